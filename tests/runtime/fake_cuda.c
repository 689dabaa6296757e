/* A CUDA driver on the host that keeps every promise as late, or as early, as it may.
 *
 * Lazy: nothing given to a stream happens before the stream is synchronised. Eager: all of it happens at once. Either
 * way an event stands for a point in the work of the "compute stream", which happens only when somebody waits for the
 * event, or at fake_finish. So a copy ahead of that wait sees memory that is not written yet, or is overwritten
 * afterwards; and a copy that nobody waits for has not happened. Device memory must be declared; a copy beyond it, a
 * function called without its context, or an event that is gone, is refused. Another thread captures a graph all the
 * time, so what may end the capture is refused to threads whose capture mode is not thread-local.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, CAPTURED = 900 };
enum { FUNCTIONS = 9, SLOTS = 1024 };
enum { SET_CONTEXT, STREAM_CREATE, STREAM_DESTROY, EVENT_SYNCHRONIZE, STREAM_SYNCHRONIZE, COPY, HOST_ALLOC, HOST_FREE, CAPTURE_MODE };

typedef struct Task { struct Task *next; char *target; const char *source; size_t bytes; } Task;
typedef struct Queue { Task *first, *last; } Queue;
typedef struct Stream { Queue queue; void *context; } Stream;
typedef struct Event { struct Event *next; size_t position; int alive; } Event;
typedef struct Range { char *at; size_t bytes; char *allocated; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Queue compute;
static size_t given, finished; /* work of the compute stream, in tasks */
static Range memory[SLOTS], pinned[SLOTS];
static int eager, countdown[FUNCTIONS], result_of[FUNCTIONS];
static long counts[7]; /* streams alive, pinned blocks alive, copies given, copies not done, bytes of the copies given,
                        * pinned bytes alive, pinned blocks and streams made */
static Event *events; /* never freed, so that the use of one that is gone can be told */
static _Thread_local void *current;
static _Thread_local int apart; /* calls of this thread leave the captures of others alone */

static void put(Queue *q, Task task) {
    Task *t = malloc(sizeof *t);
    *t = task;
    t->next = NULL;
    if (q->last) q->last->next = t; else q->first = t;
    q->last = t;
}

static int take(Queue *q, Task *task) {
    Task *t = q->first;
    if (!t) return 0;
    *task = *t;
    q->first = t->next;
    if (!q->first) q->last = NULL;
    free(t);
    return 1;
}

static int inside(Range *ranges, uint64_t at, size_t bytes) {
    for (int i = 0; i < SLOTS; i++) {
        uint64_t start = (uint64_t)(uintptr_t)ranges[i].at;
        if (start && at >= start && at + bytes <= start + ranges[i].bytes) return 1;
    }
    return 0;
}

/* Whether the memory of a copy is still there: what a test left behind must not be written to. */
static int known(const char *at, size_t bytes) {
    uint64_t address = (uint64_t)(uintptr_t)at;
    return inside(memory, address, bytes) || inside(pinned, address, bytes);
}

static void compute_until(size_t position) {
    Task t;
    while (finished < position && take(&compute, &t)) {
        if (known(t.target, t.bytes)) memcpy(t.target, t.source, t.bytes);
        free((void *)t.source);
        finished++;
    }
}

static void run(Stream *s) {
    Task t;
    while (take(&s->queue, &t)) {
        if (known(t.target, t.bytes) && known(t.source, t.bytes)) memcpy(t.target, t.source, t.bytes);
        counts[3]--;
    }
}

static Range *slot(Range *ranges, char *at) {
    for (int i = 0; i < SLOTS; i++)
        if (ranges[i].at == at) return &ranges[i];
    abort();
}

static int planted(int function) { return countdown[function] > 0 && --countdown[function] == 0 ? result_of[function] : 0; }

#define ENTER(function) \
    pthread_mutex_lock(&lock); \
    int result = planted(function)
#define LEAVE pthread_mutex_unlock(&lock); return result

int fake_set_context(void *context) {
    ENTER(SET_CONTEXT);
    if (!result) current = context;
    LEAVE;
}

int fake_stream_create(void **stream, unsigned flags) {
    ENTER(STREAM_CREATE);
    if (!result && (!current || flags != 1)) result = INVALID_CONTEXT;
    if (!result) {
        Stream *s = calloc(1, sizeof *s);
        s->context = current;
        *stream = s;
        counts[0]++;
        counts[6]++;
    }
    LEAVE;
}

int fake_stream_destroy(void *stream) {
    ENTER(STREAM_DESTROY);
    Stream *s = stream;
    if (!result && s->context != current) result = INVALID_CONTEXT;
    if (!result) {
        run(s);
        free(s);
        counts[0]--;
    }
    LEAVE;
}

int fake_event_synchronize(void *event) {
    ENTER(EVENT_SYNCHRONIZE);
    Event *e = event;
    if (!result && !current) result = INVALID_CONTEXT;
    if (!result && !apart) result = CAPTURED;
    if (!result && (!e || !e->alive)) result = INVALID_HANDLE;
    if (!result) compute_until(e->position);
    LEAVE;
}

int fake_stream_synchronize(void *stream) {
    ENTER(STREAM_SYNCHRONIZE);
    Stream *s = stream;
    if (!result && s->context != current) result = INVALID_CONTEXT;
    if (!result) run(s);
    LEAVE;
}

int fake_copy(uint64_t target, uint64_t source, size_t bytes, void *stream) {
    ENTER(COPY);
    Stream *s = stream;
    int in = inside(memory, source, bytes) && inside(pinned, target, bytes);
    int out = inside(pinned, source, bytes) && inside(memory, target, bytes);
    if (!result && s->context != current) result = INVALID_CONTEXT;
    if (!result && (!bytes || !(in || out))) result = INVALID_VALUE;
    if (!result) {
        put(&s->queue, (Task){.target = (char *)(uintptr_t)target, .source = (char *)(uintptr_t)source, .bytes = bytes});
        counts[2]++;
        counts[3]++;
        counts[4] += (long)bytes;
        if (eager) run(s);
    }
    LEAVE;
}

int fake_host_alloc(void **at, size_t bytes, unsigned flags) {
    ENTER(HOST_ALLOC);
    if (!result && (!current || flags != 1)) result = INVALID_CONTEXT;
    if (!result && !apart) result = CAPTURED;
    if (!result) {
        Range *r = slot(pinned, NULL);
        r->allocated = malloc(bytes + 8192);
        r->at = (char *)(((uintptr_t)r->allocated + 4095) & ~(uintptr_t)4095) + 512; /* never on a page boundary */
        r->bytes = bytes;
        memset(r->at, 0xA5, bytes);
        *at = r->at;
        counts[1]++;
        counts[5] += (long)bytes;
        counts[6]++;
    }
    LEAVE;
}

int fake_host_free(void *at) {
    ENTER(HOST_FREE);
    if (!result) {
        Range *r = slot(pinned, at);
        free(r->allocated);
        counts[1]--;
        counts[5] -= (long)r->bytes;
        memset(r, 0, sizeof *r);
    }
    LEAVE;
}

int fake_capture_mode(int *mode) {
    ENTER(CAPTURE_MODE);
    if (!result && *mode != 1) result = INVALID_VALUE; /* thread-local */
    if (!result) {
        *mode = 0; /* it was global */
        apart = 1;
    }
    LEAVE;
}

/* ---- for the test */

void fake_reset(int mode) {
    pthread_mutex_lock(&lock);
    memset(memory, 0, sizeof memory); /* first: nothing is written to memory of an earlier test */
    compute_until(given);
    memset(countdown, 0, sizeof countdown);
    eager = mode;
    pthread_mutex_unlock(&lock);
}

void fake_declare(void *at, size_t bytes) {
    pthread_mutex_lock(&lock);
    Range *r = slot(memory, NULL);
    r->at = at;
    r->bytes = bytes;
    pthread_mutex_unlock(&lock);
}

/* Gives the compute stream a kernel that will write `source`'s present bytes to `target`. */
void fake_launch(void *target, const void *source, size_t bytes) {
    pthread_mutex_lock(&lock);
    char *copy = malloc(bytes);
    memcpy(copy, source, bytes);
    put(&compute, (Task){.target = target, .source = copy, .bytes = bytes});
    given++;
    pthread_mutex_unlock(&lock);
}

void fake_finish(void) {
    pthread_mutex_lock(&lock);
    compute_until(given);
    pthread_mutex_unlock(&lock);
}

void fake_undeclare(void *at) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < SLOTS; i++)
        if (memory[i].at == at) memset(&memory[i], 0, sizeof(Range));
    pthread_mutex_unlock(&lock);
}

void fake_forget(void *at) {
    pthread_mutex_lock(&lock);
    memset(slot(memory, at), 0, sizeof(Range));
    pthread_mutex_unlock(&lock);
}

void *fake_event(void) {
    Event *e = calloc(1, sizeof *e);
    pthread_mutex_lock(&lock);
    *e = (Event){events, given, 1};
    events = e;
    pthread_mutex_unlock(&lock);
    return e;
}

void fake_event_destroy(void *event) {
    pthread_mutex_lock(&lock);
    ((Event *)event)->alive = 0;
    pthread_mutex_unlock(&lock);
}

/* The `nth` call of `function` from now on returns `result`. */
void fake_fail(int function, int nth, int result) {
    pthread_mutex_lock(&lock);
    countdown[function] = nth;
    result_of[function] = result;
    pthread_mutex_unlock(&lock);
}

long fake_count(int which) {
    pthread_mutex_lock(&lock);
    long found = counts[which];
    pthread_mutex_unlock(&lock);
    return found;
}
