/* What getaddrinfo says of a name: its addresses, or the error. */
#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>

int main(int argc, char **argv)
{
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
    char text[INET6_ADDRSTRLEN];
    int error = argc == 2 ? getaddrinfo(argv[1], 0, &hints, &found) : EAI_FAIL;

    if (error) {
        puts(gai_strerror(error));
        return 2;
    }
    for (; found; found = found->ai_next) {
        const void *at = found->ai_family == AF_INET
            ? (void *)&((struct sockaddr_in *)found->ai_addr)->sin_addr
            : (void *)&((struct sockaddr_in6 *)found->ai_addr)->sin6_addr;
        puts(inet_ntop(found->ai_family, at, text, sizeof text));
    }
    return 0;
}
