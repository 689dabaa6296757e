/* A pool of threads that execute positioned reads and writes.
 *
 * Why native: Inductor's CPU kernels hold the GIL, so a Python I/O thread stands still while they run.
 *
 * Contract: a request is (fd, address, bytes, offset, read|write). It is cut into pieces of PIECE bytes. Workers take
 * pieces in order, reads before writes, each first in, first out. A request is *final* when no piece runs and none is
 * left; from then on nothing accesses its memory. The caller owns the request (`req_size` bytes, set up by
 * `req_init`), and keeps it, the memory and the descriptor alive until it is final. The caller notes the request down
 * between `req_init` and `req_start`, so that an interruption in between leaves no transfer running that nobody knows
 * of.
 * With `sums` every block (checksum.h) is summed before it is written, and compared after it was read. PIECE is a
 * multiple of BLOCK, so no block is in two pieces.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"
#include "checksum.h"
#include "transfer.h"
#include "staging.h"

#ifndef IOPOOL_SOURCE_HASH
#define IOPOOL_SOURCE_HASH ""
#endif

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void enqueue(Pool *p, Request *r) {
    int q = r->operation;
    r->next = NULL;
    r->queued = 1;
    if (p->tail[q]) p->tail[q]->next = r; else p->head[q] = r;
    p->tail[q] = r;
}

static void dequeue(Pool *p, Request *r) {
    int q = r->operation;
    Request *before = NULL, *at = p->head[q];
    while (at && at != r) { before = at; at = at->next; }
    if (!at) return;
    if (before) before->next = r->next; else p->head[q] = r->next;
    if (p->tail[q] == r) p->tail[q] = before;
    r->queued = 0;
}

/* Makes the request final if no piece of it runs or waits. The lock is held. */
static void finish_if_idle(Pool *p, Request *r) {
    if (r->running || r->queued || atomic_load(&r->state) != PENDING) return;
    r->ended = now();
    int state = r->failure.error ? FAILED : (r->cursor < r->bytes ? CANCELLED : OK);
    atomic_store(&r->state, state); /* the last access to `r`: its owner may free it from here on */
    pthread_cond_broadcast(&p->finished);
}

static void run_piece(Worker *w, Request *r) {
    Pool *p = w->pool;
    size_t from = r->cursor, bytes = r->bytes - from < PIECE ? r->bytes - from : PIECE;
    Failure failure = {0};
    if (from == 0) r->started = now();
    r->cursor += bytes;
    r->running++;
    if (r->cursor == r->bytes) dequeue(p, r);
    pthread_mutex_unlock(&p->lock);
    int ok = r->device ? transfer_staged(w, r, from, bytes, &failure)
                       : transfer(r, r->memory + from, from, bytes, &failure);
    pthread_mutex_lock(&p->lock);
    r->running--;
    if (!ok && !r->failure.error) {
        r->failure = failure;
        if (r->queued) dequeue(p, r);
    }
    finish_if_idle(p, r);
}

static void *worker(void *argument) {
    Worker *w = argument;
    Pool *p = w->pool;
    pthread_setname_np(pthread_self(), "ssd_fx-io"); /* by which top and the benchmarks know these threads */
    pthread_mutex_lock(&p->lock);
    for (;;) {
        Request *r = p->head[READ] ? p->head[READ] : p->head[WRITE];
        if (r) run_piece(w, r);
        else if (p->stopping) break;
        else pthread_cond_wait(&p->work, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    free_staging(w);
    return NULL;
}

static int start_workers(Pool *p, int threads) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    for (; p->threads < threads; p->threads++) {
        Worker *w = &p->workers[p->threads];
        w->pool = p;
        if (pthread_create(&w->thread, NULL, worker, w)) break;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return p->threads;
}

const char *iopool_source_hash(void) { return IOPOOL_SOURCE_HASH; }

/* The pool, or NULL if there is no memory or no thread for it. */
Pool *pool_create(int threads) {
    Pool *p = calloc(1, sizeof *p);
    pthread_condattr_t monotonic;
    if (!p) return NULL;
    pthread_once(&checksum_once, prepare_checksum);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->work, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->finished, &monotonic);
    p->workers = calloc((size_t)threads, sizeof *p->workers);
    if (p->workers && start_workers(p, threads)) return p;
    free(p->workers);
    free(p);
    return NULL;
}

/* The bytes that checksums were computed of. */
uint64_t pool_summed_bytes(Pool *p) { return atomic_load(&p->summed_bytes); }

size_t req_size(void) { return sizeof(Request); }

/* `sums`: room for one number per block, or NULL. A write fills it, and the caller passes it to the read.
 * `device`: the memory is there, and has the first `content` of the request's bytes. NULL for host memory. The caller
 * keeps `device` alive until `pool_destroy` has returned. */
void req_init(Request *r, Pool *p, int operation, int fd, void *memory, size_t bytes, int64_t offset, uint64_t *sums,
              const Device *device, size_t content) {
    memset(r, 0, sizeof *r);
    r->pool = p;
    r->process = getpid();
    r->operation = operation;
    r->fd = fd;
    r->memory = memory;
    r->bytes = bytes;
    r->offset = offset;
    r->sums = sums;
    r->device = device;
    r->content = content;
    atomic_init(&r->state, PENDING);
}

/* Queues the request. `event`: recorded on the device's compute stream, and kept alive until the request is final;
 * NULL for host memory. */
void req_start(Request *r, void *event) {
    Pool *p = r->pool;
    pthread_mutex_lock(&p->lock);
    size_t bytes = r->bytes;
    r->started = now();
    r->event = event;
    if (atomic_load(&r->state) != PENDING) bytes = 0; /* cancelled before its start */
    else if (bytes && !p->stopping) enqueue(p, r); else finish_if_idle(p, r);
    if (bytes > PIECE) pthread_cond_broadcast(&p->work); else pthread_cond_signal(&p->work);
    pthread_mutex_unlock(&p->lock);
}

int req_state(Request *r) { return atomic_load(&r->state); }

/* The state, after at most `timeout_ms`. A negative timeout waits until the request is final. */
int req_wait(Request *r, int timeout_ms) {
    Pool *p = r->pool;
    struct timespec until;
    if (atomic_load(&r->state) != PENDING) return atomic_load(&r->state);
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) { until.tv_sec++; until.tv_nsec -= 1000000000L; }
    pthread_mutex_lock(&p->lock);
    while (atomic_load(&r->state) == PENDING) {
        if (timeout_ms < 0) pthread_cond_wait(&p->finished, &p->lock);
        else if (pthread_cond_timedwait(&p->finished, &p->lock, &until) == ETIMEDOUT) break;
    }
    pthread_mutex_unlock(&p->lock);
    return atomic_load(&r->state);
}

/* The final state, OK if all bytes were transferred. Drops the pieces that no worker has taken, and waits for those
 * that run. A request that was never started is final afterwards. */
int req_cancel(Request *r) {
    Pool *p = r->pool;
    if (atomic_load(&r->state) != PENDING || r->process != getpid()) return atomic_load(&r->state);
    pthread_mutex_lock(&p->lock);
    if (r->queued) dequeue(p, r);
    finish_if_idle(p, r);
    while (atomic_load(&r->state) == PENDING) pthread_cond_wait(&p->finished, &p->lock);
    pthread_mutex_unlock(&p->lock);
    return atomic_load(&r->state);
}

/* Valid once the request is final. */
int req_error(Request *r) { return r->failure.error; }
int64_t req_error_offset(Request *r) { return r->failure.where; }
int req_cuda_function(Request *r) { return r->failure.function; }
int req_cuda_code(Request *r) { return r->failure.code; }
double req_started(Request *r) { return r->started; }
double req_ended(Request *r) { return r->ended; }

/* Cancels what has not started, waits for what runs, joins the workers. */
void pool_destroy(Pool *p) {
    pthread_mutex_lock(&p->lock);
    p->stopping = 1;
    for (int q = 0; q < 2; q++)
        while (p->head[q]) {
            Request *r = p->head[q];
            dequeue(p, r);
            finish_if_idle(p, r);
        }
    pthread_cond_broadcast(&p->work);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->threads; i++) pthread_join(p->workers[i].thread, NULL);
    /* The pool's memory stays: another thread may still ask for the state of a request. */
}

/* STATX_DIOALIGN. Older headers lack its constants; its two numbers are at bytes 0x98 and 0x9c of struct statx. */
#define DIOALIGN_MASK 0x2000U
#define DIOALIGN_AT 0x98

/* 1 with the alignments for direct I/O on fd; 0 if the kernel does not say (older than 6.1, or some file systems); -1 if
 * there is no direct I/O on it, although the file may have been opened with O_DIRECT. */
int dio_alignment(int fd, uint32_t *memory, uint32_t *offset) {
    uint32_t raw[64] = {0}; /* 256 bytes: sizeof(struct statx) */
#ifdef SYS_statx
    if (syscall(SYS_statx, fd, "", 0x1000 /* AT_EMPTY_PATH */, DIOALIGN_MASK, raw) != 0) return 0;
#else
    return 0;
#endif
    if (!(raw[0] & DIOALIGN_MASK)) return 0;
    *memory = raw[DIOALIGN_AT / 4];
    *offset = raw[DIOALIGN_AT / 4 + 1];
    return *memory && *offset ? 1 : -1;
}
