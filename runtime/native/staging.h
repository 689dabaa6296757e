/* Transfers of memory on a CUDA device. They go through two pinned halves of each worker, so that one half is copied
 * while the other is written or read. Include after transfer.h.
 *
 * Every worker has a stream for its copies, which does not synchronise with the default stream. Before its first copy it
 * waits for the request's event, and so for the work that the compute stream had when the request was started: the
 * kernel that writes the tensor, or, before a read, the kernels that still use the memory. It waits on the host, asleep,
 * because to wait for the copy's stream instead would keep a core busy until the kernels are done. The worker waits for
 * every copy. So the memory of a final request is no longer in use, and no allocator has to know of the worker's stream.
 */

/* 1 if `result` is success; else 0, with the failure filled in. */
static int succeeded(int result, int function, int64_t where, Failure *failure) {
    if (!result) return 1;
    failure->function = function;
    failure->code = result;
    return failed(failure, CUDA_FAILED, where);
}

/* The worker's stream on the request's device, or NULL with the failure filled in. Makes the device's context current,
 * and allocates the halves. */
static void *lane(Worker *w, const Part *part, Failure *failure) {
    const Device *d = part->device;
    const Cuda *cuda = &d->cuda;
    Lane *own = &w->lanes[d->index];
    if (!succeeded(cuda->set_context(d->context), SET_CONTEXT, part->offset, failure)) return NULL;
    if (!own->stream) {
        int mode = 1; /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: no call here ends another thread's capture of a graph */
        if (!succeeded(cuda->capture_mode(&mode), CAPTURE_MODE, part->offset, failure)) return NULL;
        void *stream = NULL;
        int result = cuda->stream_create(&stream, 1 /* CU_STREAM_NON_BLOCKING */);
        if (!succeeded(result, STREAM_CREATE, part->offset, failure)) return NULL;
        own->device = d;
        own->stream = stream;
    }
    if (!w->allocated) {
        size_t bytes = 2 * HALF + 4096; /* the driver does not promise a page boundary */
        void *memory = NULL;
        int result = cuda->host_alloc(&memory, bytes, 1 /* CU_MEMHOSTALLOC_PORTABLE */);
        if (!succeeded(result, HOST_ALLOC, part->offset, failure)) return NULL;
        w->allocated = memory;
        w->half[0] = (char *)(((uintptr_t)memory + 4095) & ~(uintptr_t)4095);
        w->half[1] = w->half[0] + HALF;
    }
    return own->stream;
}

/* Starts the copy between the device and `half`. The padding after the tensor is zeros in the file, and not copied
 * back. */
static int start_copy(const Part *part, char *half, size_t from, size_t bytes, void *stream, Failure *failure) {
    size_t content = from >= part->content ? 0 : (part->content - from < bytes ? part->content - from : bytes);
    uint64_t device = (uint64_t)(uintptr_t)part->memory + from, host = (uint64_t)(uintptr_t)half;
    int write = part->operation == WRITE;
    if (write) memset(half + content, 0, bytes - content);
    if (!content) return 1;
    int result = part->device->cuda.copy(write ? host : device, write ? device : host, content, stream);
    return succeeded(result, COPY, part->offset + (int64_t)from, failure);
}

static int synchronize(const Part *part, size_t from, void *stream, Failure *failure) {
    int result = part->device->cuda.stream_synchronize(stream);
    return succeeded(result, STREAM_SYNCHRONIZE, part->offset + (int64_t)from, failure);
}

/* Returns when the device's memory may be copied. */
static int ready(const Part *part, Failure *failure) {
    int result = part->device->cuda.event_synchronize(part->request->event);
    return succeeded(result, EVENT_SYNCHRONIZE, part->offset, failure);
}

#define LENGTH(at) (end - (at) < HALF ? end - (at) : HALF)

/* Writes bytes `from` to `end`: while one half is written, the next is copied. */
static int write_staged(Worker *w, const Part *part, size_t from, size_t end, void *stream, Failure *failure) {
    int turn = 0;
    if (!ready(part, failure)) return 0;
    if (!start_copy(part, w->half[0], from, LENGTH(from), stream, failure)) return 0;
    for (size_t at = from; at < end; at += HALF, turn ^= 1) {
        size_t next = at + HALF;
        if (!synchronize(part, at, stream, failure)) return 0;
        if (next < end && !start_copy(part, w->half[!turn], next, LENGTH(next), stream, failure)) return 0;
        if (!transfer(part, w->half[turn], at, LENGTH(at), failure)) return 0;
    }
    return 1;
}

/* Reads bytes `from` to `end`: while one half is read, the one before is copied. */
static int read_staged(Worker *w, const Part *part, size_t from, size_t end, void *stream, Failure *failure) {
    int turn = 0;
    for (size_t at = from; at < end; at += HALF, turn ^= 1) {
        if (!transfer(part, w->half[turn], at, LENGTH(at), failure)) return 0;
        if (at > from && !synchronize(part, at, stream, failure)) return 0; /* the next read takes the other half */
        if (at == from && !ready(part, failure)) return 0;
        if (!start_copy(part, w->half[turn], at, LENGTH(at), stream, failure)) return 0;
    }
    return synchronize(part, from, stream, failure);
}

/* As `transfer`, for memory of a device. */
static int transfer_staged(Worker *w, const Part *part, size_t from, size_t bytes, Failure *failure) {
    void *stream = lane(w, part, failure);
    if (!stream) return 0;
    int ok = (part->operation == WRITE ? write_staged : read_staged)(w, part, from, from + bytes, stream, failure);
    if (!ok) part->device->cuda.stream_synchronize(stream); /* a copy may be running; the first failure is reported */
    return ok;
}

/* Called when the worker ends. Errors are ignored: a driver that is shutting down has freed everything already. */
static void free_staging(Worker *w) {
    const Device *last = NULL;
    for (int i = 0; i < DEVICES; i++) {
        const Device *d = w->lanes[i].device;
        if (!d) continue;
        d->cuda.set_context(d->context);
        d->cuda.stream_destroy(w->lanes[i].stream);
        last = d;
    }
    if (w->allocated) last->cuda.host_free(w->allocated); /* portable: any context will do */
}
