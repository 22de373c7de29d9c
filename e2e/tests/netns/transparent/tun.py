"""Makes a tunnel interface of a given number and sends what comes on standard input, a packet in
hexadecimal per line, as if it had come through the tunnel. At a line "again" the interface is made
anew."""
import fcntl
import struct
import subprocess
import sys

TUNSETIFF, TUNSETIFINDEX = 0x400454CA, 0x400454DA
IFF_TUN, IFF_NO_PI = 1, 0x1000

name, number = sys.argv[1], int(sys.argv[2])


def tunnel():
    tun = open("/dev/net/tun", "r+b", buffering=0)
    fcntl.ioctl(tun, TUNSETIFINDEX, struct.pack("I", number))
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "up"], check=True)
    return tun


tun = tunnel()
for line in sys.stdin:
    if line.strip() == "again":
        tun.close()
        tun = tunnel()
    else:
        tun.write(bytes.fromhex(line.strip()))
