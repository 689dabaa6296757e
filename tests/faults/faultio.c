/* Faults on the I/O of unlinked files, by rule, for tests: preload it and arm rules through ctypes.
 *
 * Touched are only calls on regular files without a name (st_nlink == 0) under the directory that `faultio_directory` was
 * told, and opens of O_TMPFILE in it. Everything else passes, so logs, caches and compilers see a sound machine.
 * A rule: which call, what happens, from the `first`-th call on every `step`-th, `most` faults at most (0: no bound); or,
 * with `step` 0, with probability `rate` from the call on, by a generator that `seed` starts.
 *
 *   an errno    the call does nothing and fails with it
 *   SHORT       the first half is transferred, in whole blocks as direct I/O needs
 *   NOTHING     returns 0: the end of the file for a read
 *   FLIP        one bit of what is written or read is another
 *   LOST        a write reports success and does nothing; a read reports success and leaves the memory as it is
 *   ZEROS       zeros are written or read in place of the bytes
 *   SLEEP       the call comes `milliseconds` late
 *
 * Not covered: io_uring, libaio, mmap, raw syscall(2). Sources: the manual pages of the calls and of dlsym(3).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum Call { WRITE, READ, ALLOCATE, TRUNCATE, OPEN, CALLS };
enum Action { SHORT = -1, NOTHING = -2, FLIP = -3, LOST = -4, ZEROS = -5, SLEEP = -6, NONE = 0 };
#define RULES 16
#define BLOCK ((size_t)4096)

struct Rule {
    int call, action, milliseconds;
    int64_t first, step, most, seen, fired;
    double rate;
    uint64_t random;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct Rule rules[RULES];
static int armed;
static int64_t calls[CALLS], faults[CALLS];
static char directory[PATH_MAX];

/* ---- what a test calls */

/* Ends all rules; where faults may happen from now on. */
void faultio_directory(const char *path) {
    pthread_mutex_lock(&lock);
    armed = 0;
    memset(directory, 0, sizeof directory);
    if (path) strncpy(directory, path, sizeof directory - 1);
    pthread_mutex_unlock(&lock);
}

/* Ends all rules and sets the counters to zero. */
void faultio_reset(void) {
    pthread_mutex_lock(&lock);
    armed = 0;
    memset(calls, 0, sizeof calls);
    memset(faults, 0, sizeof faults);
    pthread_mutex_unlock(&lock);
}

/* Ends all rules; the counters stay. */
void faultio_disarm(void) {
    pthread_mutex_lock(&lock);
    armed = 0;
    pthread_mutex_unlock(&lock);
}

/* One more rule, counted from now on; 0 if there is no room for it. */
int faultio_arm(int call, int action, int64_t first, int64_t step, int64_t most, double rate, uint64_t seed, int milliseconds) {
    pthread_mutex_lock(&lock);
    int room = armed < RULES;
    if (room)
        rules[armed++] = (struct Rule){.call = call, .action = action, .first = first, .step = step, .most = most,
                                       .rate = rate, .random = seed * 2 + 1, .milliseconds = milliseconds};
    pthread_mutex_unlock(&lock);
    return room;
}

/* Faults of the rule that was armed as the `number`-th since the last reset, from 0. */
int64_t faultio_fired(int number) {
    pthread_mutex_lock(&lock);
    int64_t fired = number >= 0 && number < RULES ? rules[number].fired : 0;
    pthread_mutex_unlock(&lock);
    return fired;
}

int64_t faultio_calls(int call) { return __atomic_load_n(&calls[call], __ATOMIC_SEQ_CST); }
int64_t faultio_faults(int call) { return __atomic_load_n(&faults[call], __ATOMIC_SEQ_CST); }

/* ---- whether a call is to fail */

static double draw(struct Rule *rule) { /* xorshift64*, uniform in [0, 1) */
    rule->random ^= rule->random >> 12;
    rule->random ^= rule->random << 25;
    rule->random ^= rule->random >> 27;
    return (double)((rule->random * 2685821657736338717ULL) >> 11) / 9007199254740992.0;
}

static int fires(struct Rule *rule) {
    int64_t number = ++rule->seen - rule->first;
    if (number < 0 || (rule->most && rule->fired >= rule->most)) return 0;
    return rule->step ? number % rule->step == 0 : draw(rule) < rule->rate;
}

/* What is to happen to this call: NONE, an errno, or one of the actions above. SLEEP has happened already. */
static int planted(int call) {
    int action = NONE, milliseconds = 0;
    pthread_mutex_lock(&lock);
    calls[call]++;
    for (int i = 0; i < armed; i++) {
        if (rules[i].call != call || !fires(&rules[i])) continue;
        rules[i].fired++;
        faults[call]++;
        if (rules[i].action == SLEEP) milliseconds += rules[i].milliseconds;
        else action = rules[i].action;
        if (action) break;
    }
    pthread_mutex_unlock(&lock);
    if (milliseconds) {
        struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
        nanosleep(&pause, NULL);
    }
    return action;
}

static int within(const char *path) {
    size_t length = strlen(directory);
    return length && !strncmp(path, directory, length) && (path[length] == '/' || !path[length]);
}

static int ours(int fd) {
    struct stat status;
    char link[64] = "/proc/self/fd/", path[PATH_MAX], digits[16];
    int saved = errno, count = 0, at = 14;
    if (!directory[0] || fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode) || status.st_nlink) { errno = saved; return 0; }
    do digits[count++] = (char)('0' + fd % 10); while (fd /= 10);
    while (count) link[at++] = digits[--count];
    ssize_t n = readlink(link, path, sizeof path - 1);
    errno = saved;
    if (n <= 0) return 0;
    path[n] = 0;
    return within(path);
}

/* ---- the calls */

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static size_t half(size_t bytes) {
    size_t blocks = bytes / 2 / BLOCK * BLOCK;
    return blocks ? blocks : bytes;
}

/* A write of other bytes than those given: `flip` or zeros, from a copy that is aligned for direct I/O. */
static ssize_t write_other(int fd, const void *bytes, size_t count, off_t offset, int flip) {
    char *copy;
    if (posix_memalign((void **)&copy, BLOCK, count ? count : 1)) { errno = ENOMEM; return -1; }
    if (flip) { memcpy(copy, bytes, count); copy[count / 2] ^= 4; } else memset(copy, 0, count);
    ssize_t done = REAL(pwrite)(fd, copy, count, offset);
    free(copy);
    return done;
}

static ssize_t faulty_write(int action, int fd, const void *bytes, size_t count, off_t offset) {
    switch (action) {
    case NONE: return REAL(pwrite)(fd, bytes, count, offset);
    case SHORT: return REAL(pwrite)(fd, bytes, half(count), offset);
    case NOTHING: return 0;
    case LOST: return (ssize_t)count;
    case FLIP: case ZEROS: return write_other(fd, bytes, count, offset, action == FLIP);
    default: errno = action; return -1;
    }
}

static ssize_t faulty_read(int action, int fd, void *bytes, size_t count, off_t offset) {
    ssize_t done;
    switch (action) {
    case NONE: return REAL(pread)(fd, bytes, count, offset);
    case SHORT: return REAL(pread)(fd, bytes, half(count), offset);
    case NOTHING: return 0;
    case LOST: return (ssize_t)count;
    case FLIP: case ZEROS:
        done = REAL(pread)(fd, bytes, count, offset);
        if (done > 0 && action == FLIP) ((char *)bytes)[done / 2] ^= 4;
        if (done > 0 && action == ZEROS) memset(bytes, 0, (size_t)done);
        return done;
    default: errno = action; return -1;
    }
}

ssize_t pwrite(int fd, const void *bytes, size_t count, off_t offset) {
    return faulty_write(ours(fd) ? planted(WRITE) : NONE, fd, bytes, count, offset);
}
ssize_t pwrite64(int fd, const void *bytes, size_t count, off64_t offset) { return pwrite(fd, bytes, count, offset); }

ssize_t pread(int fd, void *bytes, size_t count, off_t offset) {
    return faulty_read(ours(fd) ? planted(READ) : NONE, fd, bytes, count, offset);
}
ssize_t pread64(int fd, void *bytes, size_t count, off64_t offset) { return pread(fd, bytes, count, offset); }

/* A vector with a fault is cut to its first piece: a short transfer, which every caller has to expect. */
ssize_t pwritev(int fd, const struct iovec *v, int n, off_t offset) {
    int action = n && ours(fd) ? planted(WRITE) : NONE;
    return action ? faulty_write(action, fd, v->iov_base, v->iov_len, offset) : REAL(pwritev)(fd, v, n, offset);
}
ssize_t pwritev64(int fd, const struct iovec *v, int n, off64_t offset) { return pwritev(fd, v, n, offset); }
ssize_t preadv(int fd, const struct iovec *v, int n, off_t offset) {
    int action = n && ours(fd) ? planted(READ) : NONE;
    return action ? faulty_read(action, fd, v->iov_base, v->iov_len, offset) : REAL(preadv)(fd, v, n, offset);
}
ssize_t preadv64(int fd, const struct iovec *v, int n, off64_t offset) { return preadv(fd, v, n, offset); }

ssize_t pwritev2(int fd, const struct iovec *v, int n, off_t offset, int flags) {
    int action = n && ours(fd) ? planted(WRITE) : NONE;
    return action ? faulty_write(action, fd, v->iov_base, v->iov_len, offset) : REAL(pwritev2)(fd, v, n, offset, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *v, int n, off64_t offset, int flags) { return pwritev2(fd, v, n, offset, flags); }
ssize_t preadv2(int fd, const struct iovec *v, int n, off_t offset, int flags) {
    int action = n && ours(fd) ? planted(READ) : NONE;
    return action ? faulty_read(action, fd, v->iov_base, v->iov_len, offset) : REAL(preadv2)(fd, v, n, offset, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *v, int n, off64_t offset, int flags) { return preadv2(fd, v, n, offset, flags); }

int posix_fallocate(int fd, off_t offset, off_t bytes) { /* returns the error and leaves errno alone */
    int action = ours(fd) ? planted(ALLOCATE) : NONE;
    return action > 0 ? action : REAL(posix_fallocate)(fd, offset, bytes);
}
int posix_fallocate64(int fd, off64_t offset, off64_t bytes) { return posix_fallocate(fd, offset, bytes); }

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    int action = ours(fd) ? planted(ALLOCATE) : NONE;
    if (action > 0) { errno = action; return -1; }
    return REAL(fallocate)(fd, mode, offset, bytes);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) { return fallocate(fd, mode, offset, bytes); }

int ftruncate(int fd, off_t bytes) {
    int action = ours(fd) ? planted(TRUNCATE) : NONE;
    if (action > 0) { errno = action; return -1; }
    return REAL(ftruncate)(fd, bytes);
}
int ftruncate64(int fd, off64_t bytes) { return ftruncate(fd, bytes); }

static int faulty_open(const char *path, int flags) {
    int action = (flags & O_TMPFILE) == O_TMPFILE && within(path) ? planted(OPEN) : NONE;
    if (action > 0) errno = action;
    return action > 0;
}

#define MODE(mode, flags) \
    mode_t mode = 0; \
    if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
        va_list more; \
        va_start(more, flags); \
        mode = va_arg(more, mode_t); \
        va_end(more); \
    }

int open(const char *path, int flags, ...) {
    MODE(mode, flags)
    return faulty_open(path, flags) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(mode, flags)
    return faulty_open(path, flags) ? -1 : REAL(open64)(path, flags, mode);
}
int openat(int at, const char *path, int flags, ...) {
    MODE(mode, flags)
    return faulty_open(path, flags) ? -1 : REAL(openat)(at, path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE(mode, flags)
    return faulty_open(path, flags) ? -1 : REAL(openat64)(at, path, flags, mode);
}
