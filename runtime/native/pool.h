/* The types that the parts of the pool share. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PIECE ((size_t)8 << 20) /* bytes that a worker takes at a time; a multiple of BLOCK */
#ifndef HALF
#define HALF ((size_t)4 << 20) /* bytes that are copied from or to a device at a time; a multiple of BLOCK */
#endif
#define DEVICES 32

/* Error codes besides those of errno: a read hit the end of the file, a checksum differs, a CUDA function failed. */
enum { END_OF_FILE = -1, CHECKSUM_MISMATCH = -2, CUDA_FAILED = -3 };

enum { READ = 0, WRITE = 1 };
enum { PENDING = 0, OK = 1, FAILED = 2, CANCELLED = 3 };

/* The functions of the CUDA driver API, in the order of `driver.FUNCTIONS`; all return a CUresult, 0 for success. */
typedef struct Cuda {
    int (*set_context)(void *context);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*event_synchronize)(void *event);
    int (*stream_synchronize)(void *stream);
    int (*copy)(uint64_t target, uint64_t source, size_t bytes, void *stream);
    int (*host_alloc)(void **memory, size_t bytes, unsigned flags);
    int (*host_free)(void *memory);
    int (*capture_mode)(int *mode);
} Cuda;

enum {
    SET_CONTEXT, STREAM_CREATE, STREAM_DESTROY, EVENT_SYNCHRONIZE, STREAM_SYNCHRONIZE, COPY, HOST_ALLOC, HOST_FREE,
    CAPTURE_MODE
};

typedef struct Device {
    Cuda cuda;
    void *context; /* the primary context, in which torch allocates */
    int index;     /* under DEVICES */
} Device;

typedef struct Failure { /* `pool.Failure` is the same */
    int error;     /* 0, an errno or a code from above */
    int64_t where; /* offset in the file */
    int function, code; /* of CUDA_FAILED: the member of Cuda, and its result */
    double when;
} Failure;

/* What one drive moves of a request. The drive's threads take it in pieces. */
typedef struct Part {
    struct Part *next;
    struct Request *request;
    struct Drive *drive;
    int operation, fd;
    const Device *device; /* where `memory` is; NULL: on the host */
    char *memory;
    size_t bytes, cursor; /* cursor: bytes whose pieces a worker has taken */
    int64_t offset;
    uint64_t *sums; /* one per block, owned by the caller; NULL: no checksums */
    size_t content; /* bytes of `memory` on the device; the rest of `bytes` is padding */
    int running;    /* pieces that workers transfer now */
    int queued, over;
    Failure failure;
} Part;

/* Where a part's bytes are, in words, as Python passes it. */
typedef struct Place {
    int64_t drive, fd, memory, bytes, offset, sums, content;
} Place;

typedef struct Request {
    struct Pool *pool;
    pid_t process; /* the one that made it: a forked child has no workers, and must not touch the lock */
    void *event; /* the device's memory is ready when it has fired */
    int begun;
    double started, ended;
    atomic_int state;
    int parts, left; /* left: those that are not over */
    Part part[];
} Request;

typedef struct Lane {
    const Device *device;
    void *stream; /* NULL: none yet */
} Lane;

typedef struct Worker {
    struct Pool *pool;
    struct Drive *drive;
    pthread_t thread;
    void *allocated; /* pinned memory, made at the first use */
    char *half[2];   /* within it, page-aligned */
    Lane lanes[DEVICES];
} Worker;

/* A drive has threads of its own, so that a slow drive does not stop the others. */
typedef struct Drive {
    pthread_cond_t work;
    Part *head[2], *tail[2];
    _Atomic uint64_t under_way; /* bytes of the parts that have started and are not over */
} Drive;

typedef struct Pool {
    pthread_mutex_t lock;
    pthread_cond_t finished;
    int stopping, drives, threads;
    Drive *drive;
    Worker *workers;
    _Atomic uint64_t summed_bytes;
} Pool;
