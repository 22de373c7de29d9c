/* The first process of a pod. It sends as soon as it runs: datagrams to an address that no policy of
   the tests allows, then one to an address that policies allow. It goes on until it is killed. */
#include <arpa/inet.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

static void send_to(int udp, const char *text, const char *address, int port) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
  inet_pton(AF_INET, address, &to.sin_addr);
  sendto(udp, text, strlen(text), 0, (struct sockaddr *)&to, sizeof to);
}

int main(void) {
  const struct timespec interval = {.tv_nsec = 50 * 1000 * 1000};
  int udp = socket(AF_INET, SOCK_DGRAM, 0);
  for (;;) {
    for (int n = 0; n < 3; n++)
      send_to(udp, LEAK, FORBIDDEN_ADDRESS, FORBIDDEN_PORT);
    send_to(udp, "allowed", ALLOWED_ADDRESS, ALLOWED_PORT);
    nanosleep(&interval, 0);
  }
}
