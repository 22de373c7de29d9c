// Prints the IPv4 addresses of a name by Go's own resolver, or "no such name".
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
)

func main() {
	found, err := net.DefaultResolver.LookupIP(context.Background(), "ip4", os.Args[1])
	var dns *net.DNSError
	if errors.As(err, &dns) && dns.IsNotFound {
		fmt.Println("no such name")
		return
	}
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, address := range found {
		fmt.Println(address)
	}
}
