"""Asks with c-ares: SERVER NAME A|AAAA; prints the addresses, or the error's name."""

import select
import sys

import pycares

server, name, kind = sys.argv[1:]
channel = pycares.Channel(servers=[server], timeout=3, tries=1, lookups="b")


def told(result, error):
    if error is not None:
        print(pycares.errno.errorcode[error])
    for record in result or []:
        print(record.host)


channel.query(name, getattr(pycares, "QUERY_TYPE_" + kind), told)
while True:
    readers, writers = channel.getsock()
    if not readers and not writers:
        break
    ready = select.select(readers, writers, [], channel.timeout())
    for fd in ready[0]:
        channel.process_fd(fd, pycares.ARES_SOCKET_BAD)
    for fd in ready[1]:
        channel.process_fd(pycares.ARES_SOCKET_BAD, fd)
    if not ready[0] and not ready[1]:
        channel.process_fd(pycares.ARES_SOCKET_BAD, pycares.ARES_SOCKET_BAD)
