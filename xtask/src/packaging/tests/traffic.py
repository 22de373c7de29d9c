"""Traffic of a container while its host is upgraded: `serve ADDRESS` answers DNS and echoes over TCP; `load SERVER
SECONDS` asks for a name every few milliseconds over a few sockets, keeps one connection open, and prints what was lost.
With the name of a file after these, it ends once that file exists."""

import os
import select
import socket
import struct
import sys
import time

# How many times slower a machine may be.
FACTOR = int(os.environ.get("TIME_FACTOR", "1"))
# Seconds between two queries.
INTERVAL = 0.004 * FACTOR
NAME = b"\3www\7example\3org\0"


def serve(address):
    dns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    dns.bind((address, 53))
    listener = socket.create_server((address, 80))
    open_sockets = [dns, listener]
    while True:
        for ready in select.select(open_sockets, [], [])[0]:
            if ready is dns:
                query, client = dns.recvfrom(512)
                head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, 1, 0, 0)
                question = query[12 : query.index(b"\0", 12) + 5]
                answer = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 5, 4) + socket.inet_aton(address)
                dns.sendto(head + question + answer, client)
            elif ready is listener:
                open_sockets.append(listener.accept()[0])
            else:
                data = ready.recv(64)
                ready.send(data) if data else open_sockets.remove(ready)


def ask(sock, server, number):
    sock.sendto(struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + NAME + struct.pack(">HH", 1, 1), (server, 53))


def load(server, seconds, last=None):
    asked = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    asked.settimeout(5 * FACTOR)
    ask(asked, server, 1)
    asked.recv(512)
    connection = socket.create_connection((server, 80), timeout=5 * FACTOR)
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(8)]
    sent, answered, waiting, echoes = 0, 0, {}, 0
    due = time.monotonic()
    end = due + seconds
    while (now := time.monotonic()) < end + 3 * FACTOR:
        if due <= now < end:
            due += INTERVAL
            sock = sockets[sent % 8]
            number = sent % 65536
            waiting[number] = now
            ask(sock, server, number)
            sent += 1
            if sent % 20 == 0:
                connection.send(b"x")
                connection.recv(1)
                echoes += 1
                if last and os.path.exists(last):
                    end = now
        elif now >= end and not waiting:
            break
        for ready in select.select(sockets, [], [], max(0, min(due - now, INTERVAL)))[0]:
            reply = ready.recv(512)
            if reply[3] & 15 == 0 and waiting.pop(struct.unpack(">H", reply[:2])[0], None):
                answered += 1
    connection.send(b"y")
    alive = connection.recv(1) == b"y"
    print(f"sent {sent} lost {sent - answered} echoes {echoes} connection {'alive' if alive else 'dead'}", flush=True)


if sys.argv[1] == "serve":
    serve(sys.argv[2])
else:
    load(sys.argv[2], float(sys.argv[3]), *sys.argv[4:])
