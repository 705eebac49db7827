// For LD_PRELOAD: a TCP socket takes half of a message above 256 bytes, and is full for 2 ms then.
// That is what the sender of a large message meets now and then where the receiver is behind.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum { SOCKETS = 4096, BUFFERS = 16, SMALL = 256 };

static _Atomic int64_t full_until_ns[SOCKETS];
static _Atomic long count;

long times_full(void) { return count; }

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int is_tcp(int fd) {
  int domain = 0;
  socklen_t size = sizeof domain;
  if (fd >= SOCKETS || getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size)) return 0;
  return domain == AF_INET || domain == AF_INET6;
}

ssize_t writev(int fd, const struct iovec* parts, int num_parts) {
  static ssize_t (*real)(int, const struct iovec*, int);
  if (!real) real = dlsym(RTLD_NEXT, "writev");
  size_t size = 0;
  for (int i = 0; i < num_parts; ++i) size += parts[i].iov_len;
  if (!is_tcp(fd) || num_parts > BUFFERS) return real(fd, parts, num_parts);
  if (full_until_ns[fd]) {
    if (now_ns() < full_until_ns[fd]) {
      errno = EAGAIN;
      return -1;
    }
    full_until_ns[fd] = 0;
    return real(fd, parts, num_parts);
  }
  if (size <= SMALL) return real(fd, parts, num_parts);
  struct iovec half[BUFFERS];
  int used = 0;
  for (size_t left = size / 2; left; left -= half[used++].iov_len) {
    half[used] = parts[used];
    if (half[used].iov_len > left) half[used].iov_len = left;
  }
  ssize_t written = real(fd, half, used);
  if (written > 0) {
    full_until_ns[fd] = now_ns() + 2000000;
    ++count;
  }
  return written;
}
