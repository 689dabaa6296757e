/* A pool of threads that execute positioned reads and writes, with threads of its own for each drive.
 *
 * Why native: Inductor's CPU kernels hold the GIL, so a Python I/O thread stands still while they run.
 *
 * Contract: a request moves one tensor. It has a part for each drive that takes a share: (drive, fd, address, bytes,
 * offset). A part is cut into pieces of PIECE bytes. The drive's workers take pieces in order, reads before writes,
 * each first in, first out. A part is *over* when no piece of it runs and none is left. A part that fails does not stop
 * the others. A request is *final* when all parts are over; from then on nothing accesses its memory. The caller owns
 * the request (`req_size` bytes, set up by `req_init`), and keeps it, the memory and the descriptors alive until it is
 * final. The caller notes the request down between `req_init` and `req_start`, so that an interruption in between
 * leaves no transfer running that nobody knows of.
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

static void enqueue(Part *part) {
    Drive *d = part->drive;
    int q = part->operation;
    part->next = NULL;
    part->queued = 1;
    if (d->tail[q]) d->tail[q]->next = part; else d->head[q] = part;
    d->tail[q] = part;
}

static void dequeue(Part *part) {
    Drive *d = part->drive;
    int q = part->operation;
    Part *before = NULL, *at = d->head[q];
    while (at && at != part) { before = at; at = at->next; }
    if (!at) return;
    if (before) before->next = part->next; else d->head[q] = part->next;
    if (d->tail[q] == part) d->tail[q] = before;
    part->queued = 0;
}

/* OK if all bytes were transferred, FAILED if a part failed, else CANCELLED. */
static int final_state(const Request *r) {
    int state = OK;
    for (int i = 0; i < r->parts; i++) {
        if (r->part[i].failure.error) return FAILED;
        if (r->part[i].cursor < r->part[i].bytes) state = CANCELLED;
    }
    return state;
}

/* Makes the part over if no piece of it runs or waits, and the request final with its last part. The lock is held. */
static void finish_if_idle(Part *part) {
    if (part->running || part->queued || part->over) return;
    Request *r = part->request;
    Pool *p = r->pool;
    part->over = 1;
    if (r->started) { /* else it was cancelled before its start */
        r->ended = now();
        atomic_fetch_sub(&part->drive->under_way, part->bytes);
    }
    if (--r->left) return;
    int state = final_state(r);
    atomic_store(&r->state, state); /* the last access to `r`: its owner may free it from here on */
    pthread_cond_broadcast(&p->finished);
}

static void run_piece(Worker *w, Part *part) {
    Pool *p = w->pool;
    size_t from = part->cursor, bytes = part->bytes - from < PIECE ? part->bytes - from : PIECE;
    Failure failure = {0};
    if (!part->request->begun) part->request->started = now();
    part->request->begun = 1;
    part->cursor += bytes;
    part->running++;
    if (part->cursor == part->bytes) dequeue(part);
    pthread_mutex_unlock(&p->lock);
    int ok = part->device ? transfer_staged(w, part, from, bytes, &failure)
                          : transfer(part, part->memory + from, from, bytes, &failure);
    pthread_mutex_lock(&p->lock);
    part->running--;
    if (!ok && !part->failure.error) {
        part->failure = failure;
        part->failure.when = now();
        if (part->queued) dequeue(part);
    }
    finish_if_idle(part);
}

static void *worker(void *argument) {
    Worker *w = argument;
    Pool *p = w->pool;
    Drive *d = w->drive;
    pthread_setname_np(pthread_self(), "ssd_fx-io"); /* by which top and the benchmarks know these threads */
    pthread_mutex_lock(&p->lock);
    for (;;) {
        Part *part = d->head[READ] ? d->head[READ] : d->head[WRITE];
        if (part) run_piece(w, part);
        else if (p->stopping) break;
        else pthread_cond_wait(&d->work, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
    free_staging(w);
    return NULL;
}

/* Starts `threads` workers for each drive, or as many as can be had. Returns whether every drive has one. */
static int start_workers(Pool *p, int threads) {
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    for (; p->threads < threads * p->drives; p->threads++) {
        Worker *w = &p->workers[p->threads];
        w->pool = p;
        w->drive = &p->drive[p->threads % p->drives];
        if (pthread_create(&w->thread, NULL, worker, w)) break;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return p->threads >= p->drives;
}

const char *iopool_source_hash(void) { return IOPOOL_SOURCE_HASH; }

/* Cancels what has not started, waits for what runs, joins the workers. The pool's memory stays: another thread may
 * still ask for the state of a request. */
void pool_destroy(Pool *p) {
    pthread_mutex_lock(&p->lock);
    p->stopping = 1;
    for (Drive *d = p->drive; d < p->drive + p->drives; d++) {
        for (int q = 0; q < 2; q++)
            while (d->head[q]) {
                Part *part = d->head[q];
                dequeue(part);
                finish_if_idle(part);
            }
        pthread_cond_broadcast(&d->work);
    }
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->threads; i++) pthread_join(p->workers[i].thread, NULL);
}

/* The pool, or NULL if there is no memory or no thread for it. `threads`: of each drive. */
Pool *pool_create(int drives, int threads) {
    Pool *p = calloc(1, sizeof *p);
    pthread_condattr_t monotonic;
    if (!p) return NULL;
    pthread_once(&checksum_once, prepare_checksum);
    pthread_mutex_init(&p->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&p->finished, &monotonic);
    p->workers = calloc((size_t)(drives * threads), sizeof *p->workers);
    p->drive = calloc((size_t)drives, sizeof *p->drive);
    if (p->workers && p->drive) {
        p->drives = drives;
        for (int i = 0; i < drives; i++) pthread_cond_init(&p->drive[i].work, NULL);
        if (start_workers(p, threads)) return p;
        pool_destroy(p);
    }
    free(p->drive);
    free(p->workers);
    free(p);
    return NULL;
}

/* The number of bytes whose checksums were computed. */
uint64_t pool_summed_bytes(Pool *p) { return atomic_load(&p->summed_bytes); }

/* The bytes that a drive was given and has not moved yet. */
uint64_t pool_under_way(Pool *p, int drive) { return atomic_load(&p->drive[drive].under_way); }

size_t req_size(int parts) { return sizeof(Request) + (size_t)parts * sizeof(Part); }

/* Fills in a request. `sums` of a place: room for one number per block, or NULL. A write fills it, and the caller
 * passes it to the read. `content` of a place: its bytes that are in the device's memory; padding follows them.
 * `device`: the one that has the memory; NULL for the host. The caller keeps it alive until `pool_destroy` returned. */
void req_init(Request *r, Pool *p, int operation, int parts, const Place *places, const Device *device) {
    memset(r, 0, req_size(parts));
    r->pool = p;
    r->process = getpid();
    r->parts = r->left = parts;
    for (int i = 0; i < parts; i++) {
        const Place *at = &places[i];
        r->part[i] = (Part){.request = r, .drive = &p->drive[at->drive], .operation = operation, .fd = (int)at->fd,
                            .device = device, .memory = (char *)(uintptr_t)at->memory, .bytes = (size_t)at->bytes,
                            .offset = at->offset, .sums = (uint64_t *)(uintptr_t)at->sums,
                            .content = (size_t)at->content};
    }
    atomic_init(&r->state, PENDING);
}

/* Queues the request. `event`: recorded on the device's compute stream, and kept alive until the request is final;
 * NULL for host memory. */
void req_start(Request *r, void *event) {
    Pool *p = r->pool;
    pthread_mutex_lock(&p->lock);
    int parts = atomic_load(&r->state) == PENDING ? r->parts : 0; /* 0: cancelled before its start */
    r->started = now();
    r->event = event;
    for (int i = 0; i < parts; i++) {
        Part *part = &r->part[i];
        Drive *d = part->drive;
        size_t bytes = part->bytes;
        atomic_fetch_add(&d->under_way, bytes);
        if (bytes && !p->stopping) enqueue(part); else finish_if_idle(part); /* of the last part: `r` may be gone */
        if (bytes > PIECE) pthread_cond_broadcast(&d->work); else pthread_cond_signal(&d->work);
    }
    pthread_mutex_unlock(&p->lock);
}

int req_state(Request *r) { return atomic_load(&r->state); }

/* The state, after at most `timeout_ms`. */
int req_wait(Request *r, int timeout_ms) {
    Pool *p = r->pool;
    struct timespec until;
    if (atomic_load(&r->state) != PENDING) return atomic_load(&r->state);
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += (long)(timeout_ms % 1000) * 1000000L;
    if (until.tv_nsec >= 1000000000L) { until.tv_sec++; until.tv_nsec -= 1000000000L; }
    pthread_mutex_lock(&p->lock);
    while (atomic_load(&r->state) == PENDING)
        if (pthread_cond_timedwait(&p->finished, &p->lock, &until) == ETIMEDOUT) break;
    pthread_mutex_unlock(&p->lock);
    return atomic_load(&r->state);
}

/* The final state, OK if all bytes were transferred. Drops the pieces that no worker has taken, and waits for those
 * that run. A request that was never started is final afterwards. */
int req_cancel(Request *r) {
    Pool *p = r->pool;
    if (atomic_load(&r->state) != PENDING || r->process != getpid()) return atomic_load(&r->state);
    pthread_mutex_lock(&p->lock);
    for (int i = 0; i < r->parts; i++) {
        if (r->part[i].queued) dequeue(&r->part[i]);
        finish_if_idle(&r->part[i]);
    }
    while (atomic_load(&r->state) == PENDING) pthread_cond_wait(&p->finished, &p->lock);
    pthread_mutex_unlock(&p->lock);
    return atomic_load(&r->state);
}

/* Valid once the request is final. */
const Failure *req_failure(Request *r, int part) { return &r->part[part].failure; }
double req_started(Request *r) { return r->started; }
double req_ended(Request *r) { return r->ended; }

/* STATX_DIOALIGN. Older headers lack its constants; its two numbers are at bytes 0x98 and 0x9c of struct statx. */
#define DIOALIGN_MASK 0x2000U
#define DIOALIGN_AT 0x98

/* 1 with the alignments for direct I/O on fd; 0 if the kernel does not say (older than 6.1, or some file systems);
 * -1 if there is no direct I/O on it, although the file may have been opened with O_DIRECT. */
int dio_alignment(int fd, uint32_t *memory, uint32_t *offset) {
    uint32_t raw[64] = {0}; /* 256 bytes: sizeof(struct statx) */
#ifdef SYS_statx
    if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, DIOALIGN_MASK, raw) != 0) return 0;
#else
    return 0;
#endif
    if (!(raw[0] & DIOALIGN_MASK)) return 0;
    *memory = raw[DIOALIGN_AT / 4];
    *offset = raw[DIOALIGN_AT / 4 + 1];
    return *memory && *offset ? 1 : -1;
}
