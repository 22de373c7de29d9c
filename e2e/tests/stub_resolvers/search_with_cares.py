"""Asks with c-ares and the search list of resolv.conf: NAME; prints IPv4 addresses or the error."""

import select
import socket
import sys

import pycares

channel = pycares.Channel(timeout=3, tries=1, lookups="b")


def told(result, error):
    if error is not None:
        print(pycares.errno.errorcode[error])
    else:
        for address in result.addresses:
            print(address)


channel.gethostbyname(sys.argv[1], socket.AF_INET, told)
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
