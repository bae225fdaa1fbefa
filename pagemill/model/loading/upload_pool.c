// Threads that read files, or memory, piece by piece into pinned buffers, and send each piece to a device.
//
// Nothing here needs Python's lock, which is held by whoever builds the model meanwhile. The calls of the device are those
// of the CUDA driver, handed over as pointers. upload_pool.py has the same structs, and declares what is exported.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    ENDED_EARLY = -1,     // a status: 0, an errno, this, or a status of the device less DEVICE_FAILED
    DEVICE_FAILED = 1000,
    NON_BLOCKING = 1,     // a stream that is not in order with the default stream
    SLEEPS = 1,           // an event that is waited for asleep
    NO_TIMING = 2,
    HUGE_PAGE = 2 << 20,
};

struct device {
    int (*set_context)(void* context);
    int (*make_stream)(void** stream, unsigned flags);
    int (*end_stream)(void* stream);
    int (*make_event)(void** event, unsigned flags);
    int (*end_event)(void* event);
    int (*record)(void* event, void* stream);
    int (*hold)(void* stream, void* event, unsigned flags);
    int (*finish)(void* event);
    int (*copy)(uint64_t target, const void* source, size_t num_bytes, void* stream);
    int (*pin)(void* address, size_t num_bytes, unsigned flags);
    int (*unpin)(void* address);
    void* context;
    void* main_stream;
    void* keeps;  // not NULL: what has been pinned stays so, for the next pool of the same context
};

// Bytes of a file from `begin` on; where `file` is -1, rows in memory, the first at the address `begin`.
struct source {
    int64_t file, begin, num_bytes;
    int64_t row_bytes, row_stride;  // in memory: a piece has whole rows
};

struct upload {
    struct source source;
    struct upload* next;
    uint64_t target;
    void* begins;        // the event from which on the target may be written
    int64_t step, done;  // bytes of a piece, and of those that were taken
    int64_t num_left;    // pieces that have not been enqueued
    int64_t num_sent;
    void** sent;  // the events when those that were will have been sent
    int64_t status;
};

enum { NUM_STREAMS = 2, MAX_BUFFERS = 8 };

struct pool;

// What a thread has for itself: buffers that are used by turns.
struct lane {
    struct pool* pool;
    pthread_t thread;
    void* stream;  // shared with others: what a device has to send, it sends one after the other
    char* memory;
    void* sent[MAX_BUFFERS];  // the event when what a buffer had last will have been sent
    int64_t turn;
    int is_open, is_pinned;
    int64_t status;  // of its opening
};

struct pool {
    struct device device;
    void* streams[NUM_STREAMS];
    int64_t buffer_bytes, num_buffers, num_lanes;
    pthread_mutex_t lock;  // never held while the device is called
    pthread_cond_t more, enqueued;
    struct upload *first, *last;  // those of which pieces are left to take
    int is_complete;              // nothing will be added any more
    int is_closing;               // what is left is not taken
    struct lane lanes[];
};

static int64_t failed(int status) { return status ? -(int64_t)status - DEVICE_FAILED : 0; }

static size_t lane_bytes(const struct pool* pool) { return (size_t)(pool->buffer_bytes * pool->num_buffers); }

// What lanes that have ended had pinned: to do so again would take a tenth of the time in which 5 GB are sent.
struct kept {
    struct kept* next;
    void* context;
    char* memory;
    size_t num_bytes;
};
static struct kept* all_kept;
static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;

// NULL where there is none.
static char* take_kept(const struct pool* pool) {
    pthread_mutex_lock(&kept_lock);
    struct kept** at = &all_kept;
    while (*at && ((*at)->context != pool->device.context || (*at)->num_bytes != lane_bytes(pool))) at = &(*at)->next;
    struct kept* found = *at;
    if (found) *at = found->next;
    pthread_mutex_unlock(&kept_lock);
    char* memory = found ? found->memory : NULL;
    free(found);
    return memory;
}

// Whether it is; not where there is no memory to note it.
static int keep(const struct lane* lane) {
    struct kept* made = malloc(sizeof *made);
    if (!made) return 0;
    pthread_mutex_lock(&kept_lock);
    *made = (struct kept){all_kept, lane->pool->device.context, lane->memory, lane_bytes(lane->pool)};
    all_kept = made;
    pthread_mutex_unlock(&kept_lock);
    return 1;
}

static char* buffers_of(const struct lane* lane) {
    return (char*)(((uintptr_t)lane->memory + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
}

static int64_t open_lane(struct lane* lane) {
    struct pool* pool = lane->pool;
    const struct device* device = &pool->device;
    int64_t status = failed(device->set_context(device->context));
    for (int64_t i = 0; i < pool->num_buffers && !status; ++i)
        status = failed(device->make_event(&lane->sent[i], SLEEPS | NO_TIMING));
    if (status) return status;
    lane->memory = device->keeps ? take_kept(pool) : NULL;
    lane->is_pinned = lane->memory != NULL;
    if (lane->is_pinned) return 0;
    size_t size = lane_bytes(pool);
    void* memory = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return ENOMEM;
    madvise(memory, size + HUGE_PAGE, MADV_HUGEPAGE);
    lane->memory = memory;
    char* aligned = buffers_of(lane);
    // Here each thread makes its pages; the driver would make all threads' in turn.
    for (size_t i = 0; i < size; i += 4096) aligned[i] = 0;
    // A copy from memory that is not pinned has read it when it returns: that is slower, and as good.
    lane->is_pinned = device->pin(aligned, size, 0) == 0;
    return 0;
}

// Give memory back, or keep it, when everything has been sent. Events stay: who waits for an upload asks for them.
static void close_lane(struct lane* lane) {
    struct pool* pool = lane->pool;
    for (int64_t i = 0; i < pool->num_buffers; ++i)
        if (lane->sent[i]) pool->device.finish(lane->sent[i]);
    if (lane->is_pinned && pool->device.keeps && keep(lane)) return;
    if (lane->is_pinned) pool->device.unpin(buffers_of(lane));
    if (lane->memory) munmap(lane->memory, lane_bytes(pool) + HUGE_PAGE);
}

static int64_t fill(char* buffer, const struct source* source, int64_t begin, int64_t num_bytes) {
    if (source->file < 0) {
        const char* row = (const char*)source->begin + begin / source->row_bytes * source->row_stride;
        if (source->row_bytes == source->row_stride) {
            memcpy(buffer, row, num_bytes);
            return 0;
        }
        for (int64_t i = 0; i < num_bytes; i += source->row_bytes, row += source->row_stride)
            memcpy(buffer + i, row, source->row_bytes);
        return 0;
    }
    for (int64_t done = 0; done < num_bytes;) {
        ssize_t count = pread((int)source->file, buffer + done, num_bytes - done, source->begin + begin + done);
        if (count == 0) return ENDED_EARLY;
        if (count < 0 && errno != EINTR) return errno;
        if (count > 0) done += count;
    }
    return 0;
}

// Read and enqueue one piece; the event when it will have been sent.
static int64_t send_piece(struct lane* lane, struct upload* upload, int64_t begin, int64_t num_bytes, void** sent) {
    const struct pool* pool = lane->pool;
    const struct device* device = &pool->device;
    if (!lane->is_open) lane->status = open_lane(lane);
    lane->is_open = 1;
    if (lane->status) return lane->status;
    int64_t place = lane->turn++ % pool->num_buffers;
    char* buffer = buffers_of(lane) + place * pool->buffer_bytes;
    *sent = lane->sent[place];
    int64_t status = failed(device->finish(*sent));
    if (!status) status = fill(buffer, &upload->source, begin, num_bytes);
    if (!status) status = failed(device->hold(lane->stream, upload->begins, 0));
    if (!status) status = failed(device->copy(upload->target + begin, buffer, num_bytes, lane->stream));
    return status ? status : failed(device->record(*sent, lane->stream));
}

static void* work(void* given) {
    struct lane* lane = given;
    struct pool* pool = lane->pool;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->first && !pool->is_complete) pthread_cond_wait(&pool->more, &pool->lock);
        if (!pool->first || pool->is_closing) break;
        struct upload* upload = pool->first;
        int64_t begin = upload->done;
        int64_t left = upload->source.num_bytes - begin;
        int64_t num_bytes = left < upload->step ? left : upload->step;
        upload->done += num_bytes;
        if (num_bytes == left) pool->first = upload->next;
        int64_t status = upload->status;
        void* sent = NULL;
        if (!status) {
            pthread_mutex_unlock(&pool->lock);
            status = send_piece(lane, upload, begin, num_bytes, &sent);
            pthread_mutex_lock(&pool->lock);
        }
        if (status && !upload->status) upload->status = status;
        if (!status) upload->sent[upload->num_sent++] = sent;
        if (--upload->num_left == 0) pthread_cond_broadcast(&pool->enqueued);
    }
    pthread_mutex_unlock(&pool->lock);
    close_lane(lane);
    return NULL;
}

static void free_pool(struct pool* pool) {
    for (int i = 0; i < NUM_STREAMS; ++i)
        if (pool->streams[i]) pool->device.end_stream(pool->streams[i]);
    for (int64_t i = 0; i < pool->num_lanes; ++i)
        for (int64_t j = 0; j < pool->num_buffers; ++j)
            if (pool->lanes[i].sent[j]) pool->device.end_event(pool->lanes[i].sent[j]);
    pthread_mutex_destroy(&pool->lock);
    pthread_cond_destroy(&pool->more);
    pthread_cond_destroy(&pool->enqueued);
    free(pool);
}

// NULL where there is no memory, or no thread at all, or the device fails: *status says so.
struct pool* pm_pool_open(const struct device* device, int64_t num_threads, int64_t buffer_bytes, int64_t num_buffers,
                          int64_t* status) {
    struct pool* pool = calloc(1, sizeof(struct pool) + num_threads * sizeof(struct lane));
    *status = pool ? 0 : ENOMEM;
    if (!pool) return NULL;
    pool->device = *device;
    pool->buffer_bytes = buffer_bytes;
    pool->num_buffers = num_buffers < MAX_BUFFERS ? num_buffers : MAX_BUFFERS;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->more, NULL);
    pthread_cond_init(&pool->enqueued, NULL);
    for (int i = 0; i < NUM_STREAMS && !*status; ++i)
        *status = failed(device->make_stream(&pool->streams[i], NON_BLOCKING));
    while (pool->num_lanes < num_threads && !*status) {
        struct lane* lane = &pool->lanes[pool->num_lanes];
        lane->pool = pool;
        lane->stream = pool->streams[pool->num_lanes % NUM_STREAMS];
        int refused = pthread_create(&lane->thread, NULL, work, lane);
        if (refused && !pool->num_lanes) *status = refused;
        if (refused) break;
        ++pool->num_lanes;
    }
    if (!*status) return pool;
    free_pool(pool);
    return NULL;
}

// Send a source to a device's address, in order with what the main stream has by now. Source and target are to stay until
// `pm_pool_wait`, or `pm_pool_close`. NULL where there is no memory; *status: why else.
struct upload* pm_pool_add(struct pool* pool, const struct source* source, uint64_t target, int64_t* status) {
    const struct device* device = &pool->device;
    int64_t step = pool->buffer_bytes;
    if (source->file < 0) step = step / source->row_bytes * source->row_bytes;
    int64_t num_pieces = (source->num_bytes + step - 1) / step;
    struct upload* upload = calloc(1, sizeof(struct upload) + num_pieces * sizeof(void*));
    *status = upload ? failed(device->make_event(&upload->begins, NO_TIMING)) : ENOMEM;
    if (!*status) *status = failed(device->record(upload->begins, device->main_stream));
    if (*status) {
        if (upload && upload->begins) device->end_event(upload->begins);
        free(upload);
        return NULL;
    }
    upload->source = *source;
    upload->target = target;
    upload->step = step;
    upload->num_left = num_pieces;
    upload->sent = (void**)(upload + 1);
    if (!num_pieces) return upload;
    pthread_mutex_lock(&pool->lock);
    if (pool->first) pool->last->next = upload;
    else pool->first = upload;
    pool->last = upload;
    if (num_pieces > 1) pthread_cond_broadcast(&pool->more);
    else pthread_cond_signal(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    return upload;
}

static void end(struct pool* pool, struct upload* upload) {
    pool->device.end_event(upload->begins);
    free(upload);
}

// Return when all of an upload has been read; the main stream waits until it has been sent. Frees the upload. A status.
int64_t pm_pool_wait(struct pool* pool, struct upload* upload) {
    pthread_mutex_lock(&pool->lock);
    while (upload->num_left) pthread_cond_wait(&pool->enqueued, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    int64_t status = upload->status;
    for (int64_t i = 0; i < upload->num_sent; ++i) {
        int64_t held = failed(pool->device.hold(pool->device.main_stream, upload->sent[i], 0));
        if (!status) status = held;
    }
    end(pool, upload);
    return status;
}

// Nothing will be added any more: threads end when they find nothing left.
void pm_pool_complete(struct pool* pool) {
    pthread_mutex_lock(&pool->lock);
    pool->is_complete = 1;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
}

// Return when nothing is read and sent any more. `left`: the uploads that nobody has waited for; all is freed.
void pm_pool_close(struct pool* pool, struct upload** left, int64_t num_left) {
    pthread_mutex_lock(&pool->lock);
    pool->is_closing = pool->is_complete = 1;
    pthread_cond_broadcast(&pool->more);
    pthread_mutex_unlock(&pool->lock);
    for (int64_t i = 0; i < pool->num_lanes; ++i) pthread_join(pool->lanes[i].thread, NULL);
    for (int64_t i = 0; i < num_left; ++i) end(pool, left[i]);
    free_pool(pool);
}
