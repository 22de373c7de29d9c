"""Asks with dnspython: SERVER NAME TYPE udp|tcp|fallback; prints code, extended errors, addresses."""

import sys

import dns.edns
import dns.message
import dns.query
import dns.rcode

server, name, kind, way = sys.argv[1:]
query = dns.message.make_query(name, kind, want_dnssec=True)
if way == "udp":
    answer = dns.query.udp(query, server, timeout=3)
elif way == "tcp":
    answer = dns.query.tcp(query, server, timeout=3)
else:
    answer, over_tcp = dns.query.udp_with_fallback(query, server, timeout=3)
    assert over_tcp, "the answer was to be cut"
print(dns.rcode.to_text(answer.rcode()))
for option in answer.options:
    if option.otype == dns.edns.OptionType.EDE:
        print("EDE", int(option.code))
for records in answer.answer:
    for record in records:
        print(record.to_text())
