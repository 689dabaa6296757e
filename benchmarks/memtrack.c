/* Counts the bytes of all live CPU tensors, exactly, on every thread. To be preloaded:
 *
 *     cc -O2 -shared -fPIC -pthread -o memtrack.so memtrack.c -ldl
 *     LD_PRELOAD=./memtrack.so python ...
 *
 * PyTorch takes every CPU storage from posix_memalign with an alignment of 64 bytes or more, from eager ops and from
 * Inductor's C++ alike, and returns it with free. So allocations of at least that alignment are entered in a table of
 * addresses, and removed when they are freed. Not seen: what is mmap'ed, and tensors over memory that others own; who owns
 * such memory can report it with memtrack_adjust.
 *
 * The table is open addressing with linear probing; a removal moves later entries back instead of leaving a tombstone, so
 * that the search for an address that is not there (most calls of free) stays short.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

#define MIN_ALIGNMENT 64
#define SLOTS (1u << 18) /* a power of two; at most 3/4 of them are used */

static struct {
    uintptr_t address; /* 0: empty */
    size_t nbytes;
} table[SLOTS];
static uint32_t used;
static int64_t live, peak, untracked;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int (*real_posix_memalign)(void **, size_t, size_t);
static void *(*real_memalign)(size_t, size_t);
static void *(*real_aligned_alloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static void (*real_free)(void *);

static void take_lock(void) { pthread_mutex_lock(&lock); }
static void drop_lock(void) { pthread_mutex_unlock(&lock); }

/* Runs before any other code of the process can call us, except the loader's own free, which finds real_free unset. */
__attribute__((constructor)) static void resolve(void) {
    if (real_free) return;
    real_posix_memalign = dlsym(RTLD_NEXT, "posix_memalign");
    real_memalign = dlsym(RTLD_NEXT, "memalign");
    real_aligned_alloc = dlsym(RTLD_NEXT, "aligned_alloc");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_free = dlsym(RTLD_NEXT, "free");
    pthread_atfork(take_lock, drop_lock, drop_lock);
}

static uint32_t home(uintptr_t address) {
    return (uint32_t)(((uint64_t)address >> 6) * 0x9E3779B97F4A7C15ull >> 40) & (SLOTS - 1);
}

static void enter(void *pointer, size_t nbytes) {
    if (!pointer) return;
    take_lock();
    if (used >= SLOTS / 4 * 3) {
        untracked++;
    } else {
        uint32_t slot = home((uintptr_t)pointer);
        while (table[slot].address) slot = (slot + 1) & (SLOTS - 1);
        table[slot].address = (uintptr_t)pointer;
        table[slot].nbytes = nbytes;
        used++;
        live += (int64_t)nbytes;
        if (live > peak) peak = live;
    }
    drop_lock();
}

/* Removes the entry at `hole`, and closes the gap so that no search stops short of an entry behind it. */
static void close_gap(uint32_t hole) {
    for (uint32_t next = (hole + 1) & (SLOTS - 1); table[next].address; next = (next + 1) & (SLOTS - 1)) {
        uint32_t wanted = home(table[next].address);
        if (((next - wanted) & (SLOTS - 1)) >= ((next - hole) & (SLOTS - 1))) {
            table[hole] = table[next];
            hole = next;
        }
    }
    table[hole].address = 0;
}

/* Removes `pointer` and returns 1 with its size in `nbytes`, or returns 0. Must come before the real free: behind it another
 * thread may be given the same address. */
static int leave(void *pointer, size_t *nbytes) {
    uintptr_t address = (uintptr_t)pointer;
    int found = 0;
    if (!address || address % MIN_ALIGNMENT) return 0;
    take_lock();
    for (uint32_t slot = home(address); table[slot].address; slot = (slot + 1) & (SLOTS - 1)) {
        if (table[slot].address == address) {
            *nbytes = table[slot].nbytes;
            live -= (int64_t)*nbytes;
            used--;
            close_gap(slot);
            found = 1;
            break;
        }
    }
    drop_lock();
    return found;
}

int posix_memalign(void **result, size_t alignment, size_t nbytes) {
    resolve();
    int error = real_posix_memalign(result, alignment, nbytes);
    if (!error && alignment >= MIN_ALIGNMENT) enter(*result, nbytes);
    return error;
}

void *memalign(size_t alignment, size_t nbytes) {
    resolve();
    void *pointer = real_memalign(alignment, nbytes);
    if (alignment >= MIN_ALIGNMENT) enter(pointer, nbytes);
    return pointer;
}

void *aligned_alloc(size_t alignment, size_t nbytes) {
    resolve();
    void *pointer = real_aligned_alloc(alignment, nbytes);
    if (alignment >= MIN_ALIGNMENT) enter(pointer, nbytes);
    return pointer;
}

/* realloc keeps no alignment, so what it returns is no tensor and is not entered. */
void *realloc(void *pointer, size_t nbytes) {
    size_t before;
    resolve();
    int tracked = leave(pointer, &before);
    void *moved = real_realloc(pointer, nbytes);
    if (tracked && !moved && nbytes) enter(pointer, before); /* failed: the old block is still there */
    return moved;
}

void free(void *pointer) {
    size_t nbytes;
    if (!pointer || !real_free) return; /* before `resolve`: a few bytes of the loader are not returned */
    leave(pointer, &nbytes);
    real_free(pointer);
}

static int64_t read_locked(const int64_t *value) {
    take_lock();
    int64_t result = *value;
    drop_lock();
    return result;
}

int64_t memtrack_live(void) { return read_locked(&live); }
int64_t memtrack_peak(void) { return read_locked(&peak); }
int64_t memtrack_untracked(void) { return read_locked(&untracked); }

/* `delta` bytes of memory that is not seen here were taken, or given back if negative. */
void memtrack_adjust(int64_t delta) {
    take_lock();
    live += delta;
    if (live > peak) peak = live;
    drop_lock();
}

void memtrack_reset_peak(void) {
    take_lock();
    peak = live;
    drop_lock();
}
