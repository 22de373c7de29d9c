"""Asks with c-ares and prints the addresses, or the error's name.

SERVER NAME A|AAAA asks one server; NAME alone follows resolv.conf and its search list.
"""

import select
import socket
import sys

import pycares


def told(result, error):
    if error is not None:
        print(pycares.errno.errorcode[error])
    elif isinstance(result, list):
        for record in result:
            print(record.host)
    else:
        for address in result.addresses:
            print(address)


# `lookups` is not given: Debian's pycares 4.3 frees that text before c-ares has copied it.
if len(sys.argv) == 2:
    channel = pycares.Channel(timeout=3, tries=1)
    channel.gethostbyname(sys.argv[1], socket.AF_INET, told)
else:
    server, name, kind = sys.argv[1:]
    channel = pycares.Channel(servers=[server], timeout=3, tries=1)
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
