"""Makes a tunnel interface and sends what comes on standard input, a packet in hexadecimal
per line, as if it had come through the tunnel."""
import fcntl
import struct
import subprocess
import sys

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000

name = sys.argv[1]
with open("/dev/net/tun", "r+b", buffering=0) as tun:
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    for line in sys.stdin:
        tun.write(bytes.fromhex(line.strip()))
