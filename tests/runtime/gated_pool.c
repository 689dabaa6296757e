/* The pool, with drives whose writes a test holds up, or lets fail. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <unistd.h>

enum { DESCRIPTORS = 4096 };

static atomic_int held[DESCRIPTORS], failing[DESCRIPTORS], to_come[DESCRIPTORS];

void gate_hold(int fd, int on) { atomic_store(&held[fd], on); }

/* The write after `nth` others fails with `code`; 0: none. */
void gate_fail(int fd, int code, int nth) {
    atomic_store(&to_come[fd], nth);
    atomic_store(&failing[fd], code);
}

static ssize_t gated_pwrite(int fd, const void *memory, size_t bytes, off_t at) {
    int known = fd >= 0 && fd < DESCRIPTORS, code = known ? atomic_load(&failing[fd]) : 0;
    while (known && atomic_load(&held[fd])) usleep(500);
    if (!code || atomic_fetch_sub(&to_come[fd], 1)) return pwrite(fd, memory, bytes, at);
    errno = code;
    return -1;
}

#define pwrite gated_pwrite
#include "iopool.c"
