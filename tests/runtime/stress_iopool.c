/* Threads in pairs submit, poll, wait for and cancel requests, of host memory and of a fake device, both members of a pair
 * on the same request, which is freed with its memory the moment it is final; pools are destroyed under load. To be built
 * with a sanitizer, together with fake_cuda.c. Arguments: a directory, milliseconds per pool, pools.
 */
#include "iopool.c"

#include <stdio.h>

enum { PAIRS = 3, POOLS = 16, ROOM = 32 << 20, DRIVES = 2 };

extern int fake_set_context(void *), fake_stream_create(void **, unsigned), fake_stream_destroy(void *);
extern int fake_event_synchronize(void *), fake_stream_synchronize(void *), fake_capture_mode(int *);
extern int fake_copy(uint64_t, uint64_t, size_t, void *), fake_host_alloc(void **, size_t, unsigned), fake_host_free(void *);
extern void fake_declare(void *, size_t), fake_forget(void *), fake_launch(void *, const void *, size_t), fake_finish(void);
extern void *fake_event(void);
extern void fake_event_destroy(void *);

typedef struct Pair {
    pthread_barrier_t meet;
    Pool *pool;
    const Device *device;
    Request *request;
    int fd, over, drive;
    int64_t offset;
    long ok, cancelled, wrong;
    unsigned seed, second_seed;
} Pair;

static Pool *pools[POOLS]; /* they stay, so that they can be asked after their end */
static atomic_int stop;

static unsigned next(unsigned *seed) { return *seed = *seed * 1664525u + 1013904223u, *seed >> 8; }

/* One of the ways to get to the end of a request. */
static void finish_somehow(Request *r, unsigned choice) {
    switch (choice % 5) {
    case 0: while (req_state(r) == PENDING) sched_yield(); break;
    case 1: while (req_wait(r, 100) == PENDING) {} break;
    case 2: while (req_wait(r, 1) == PENDING) {} break;
    case 3: req_cancel(r); break;
    default: req_wait(r, 1); req_cancel(r);
    }
}

typedef struct Bytes { unsigned char *memory, *want; size_t bytes; void *event; } Bytes;

static Bytes make_bytes(size_t bytes, unsigned char fill, int on_device) {
    Bytes b = {malloc(bytes), malloc(bytes), bytes, NULL};
    memset(b.want, fill, bytes);
    if (!on_device) { memcpy(b.memory, b.want, bytes); return b; }
    fake_declare(b.memory, bytes);
    fake_launch(b.memory, b.want, bytes);
    b.event = fake_event();
    return b;
}

static void free_bytes(Bytes b) {
    if (b.event) {
        fake_finish();
        fake_event_destroy(b.event);
        fake_forget(b.memory);
    }
    free(b.memory);
    free(b.want);
}

/* A request for all drives, or for one. The parts begin at multiples of BLOCK, so the sums of each are in one place. */
static Request *make_request(Pair *p, int operation, Bytes b, uint64_t *sums) {
    Place places[DRIVES];
    int parts = b.bytes > BLOCK ? DRIVES : 1;
    for (int i = 0; i < parts; i++) {
        size_t from = b.bytes / parts * i / BLOCK * BLOCK;
        size_t end = i + 1 < parts ? b.bytes / parts * (i + 1) / BLOCK * BLOCK : b.bytes;
        places[i] = (Place){(i + p->drive) % DRIVES, p->fd, (int64_t)(uintptr_t)(b.memory + from), end - from,
                            p->offset + (int64_t)from, (int64_t)(uintptr_t)(sums + from / BLOCK), end - from};
    }
    Request *r = malloc(req_size(parts));
    req_init(r, p->pool, operation, parts, places, b.event ? p->device : NULL);
    return r;
}

static int first_error(Request *r) {
    for (int i = 0; i < r->parts; i++) if (req_failure(r, i)->error) return req_failure(r, i)->error;
    return 0;
}

/* Member 0's half of a transfer, in which member 1 takes part. */
static int transfer_together(Pair *p, int operation, Bytes b, uint64_t *sums) {
    Request *r = p->request = make_request(p, operation, b, sums);
    pthread_barrier_wait(&p->meet); /* before the start, so that it may be cancelled before it */
    req_start(r, b.event);
    finish_somehow(r, next(&p->seed) % 3 ? 1 : next(&p->seed));
    pthread_barrier_wait(&p->meet);
    int state = req_state(r), error = first_error(r);
    if (state == OK) p->ok++; else if (state == CANCELLED) p->cancelled++;
    if (state == FAILED || error) {
        p->wrong++;
        fprintf(stderr, "operation %d of %zu B: error %d\n", operation, b.bytes, error);
    }
    free(r);
    return state;
}

static void *first_member(void *argument) {
    Pair *p = argument;
    while (!atomic_load(&stop)) {
        unsigned n = next(&p->seed);
        size_t bytes = 1 + next(&p->seed) % (n % 8 ? 40000 : 9 << 20);
        uint64_t *sums = calloc(bytes / BLOCK + 1, sizeof *sums);
        Bytes source = make_bytes(bytes, (unsigned char)n, n >> 4 & 1), target = make_bytes(bytes, 0, n >> 5 & 1);
        if (transfer_together(p, WRITE, source, sums) == OK && transfer_together(p, READ, target, sums) == OK) {
            if (target.event) fake_finish();
            if (memcmp(target.memory, source.want, bytes)) p->wrong++;
        }
        free_bytes(source);
        free_bytes(target);
        free(sums);
    }
    p->over = 1;
    pthread_barrier_wait(&p->meet);
    return NULL;
}

static void *second_member(void *argument) {
    Pair *p = argument;
    unsigned seed = p->second_seed;
    for (;;) {
        pthread_barrier_wait(&p->meet);
        if (p->over) return NULL;
        finish_somehow(p->request, next(&seed) % 3 ? 2 : next(&seed));
        pthread_barrier_wait(&p->meet);
    }
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    int milliseconds = atoi(arguments[2]), rounds = atoi(arguments[3]);
    int fd = open(arguments[1], O_TMPFILE | O_RDWR, 0600);
    long ok = 0, cancelled = 0, wrong = 0;
    Device device = {{fake_set_context, fake_stream_create, fake_stream_destroy, fake_event_synchronize,
                      fake_stream_synchronize, fake_copy, fake_host_alloc, fake_host_free, fake_capture_mode},
                     (void *)0x1000, 0};
    if (fd < 0 || rounds > POOLS) return 2;
    for (int round = 0; round < rounds; round++) {
        Pair pairs[PAIRS];
        pthread_t threads[2 * PAIRS];
        Pool *pool = pools[round] = pool_create(DRIVES, 2);
        memset(pairs, 0, sizeof pairs);
        atomic_store(&stop, 0);
        for (int i = 0; i < PAIRS; i++) {
            Pair *p = &pairs[i];
            pthread_barrier_init(&p->meet, NULL, 2);
            p->pool = pool, p->device = &device, p->fd = fd, p->offset = (int64_t)i * ROOM;
            p->drive = i % DRIVES;
            p->seed = (unsigned)(round * PAIRS + i + 1);
            p->second_seed = ~p->seed;
            pthread_create(&threads[2 * i], NULL, first_member, p);
            pthread_create(&threads[2 * i + 1], NULL, second_member, p);
        }
        struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
        nanosleep(&pause, NULL);
        pool_destroy(pool); /* under load: what is submitted from here on is cancelled */
        atomic_store(&stop, 1);
        for (int i = 0; i < 2 * PAIRS; i++) pthread_join(threads[i], NULL);
        for (int i = 0; i < PAIRS; i++) {
            ok += pairs[i].ok, cancelled += pairs[i].cancelled, wrong += pairs[i].wrong;
            pthread_barrier_destroy(&pairs[i].meet);
        }
    }
    close(fd);
    printf("ok %ld cancelled %ld wrong %ld\n", ok, cancelled, wrong);
    return wrong != 0;
}
