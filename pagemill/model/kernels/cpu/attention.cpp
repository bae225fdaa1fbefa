// Attention straight from the block table, for any mix of decodes and prefill chunks; and the writing of the cache.
//
// A task is (request, KV head, tile of query tokens): the query heads of a KV head share every key and value that is
// read. Keys are taken in chunks at absolute positions with an online softmax (Milakov and Gimelshein, 2018), so a
// row's result has the same bits alone, in any batch, and however its prompt was cut into steps.
#include <cmath>
#include <vector>

#include "vector.h"

using namespace pagemill;

namespace {

constexpr int64_t CHUNK = 64;
constexpr int64_t MAX_ROWS = 8;

struct Problem {
  void* out;
  const void* query;      // [T, H, D], query_stride elements between tokens
  const void* cache;      // [2, num_blocks, Hkv, block_size, D]
  const int32_t* query_start;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t query_stride, num_requests, table_stride, num_blocks, block_size;
  int64_t num_heads, num_kv_heads, head_size;
  int64_t window;         // 0: none
  float scale, soft_cap;  // soft_cap 0: none
};

struct Task {
  int64_t request, kv_head, token, num_tokens;  // token: index in the request's query
};

// One row is one query head of one token.
struct Row {
  int64_t first_key, last_key;  // keys it sees: [first_key, last_key)
  float best, mass;
};

inline vf scaled(vf scores, const Problem& p) {
  scores *= p.scale;
  return p.soft_cap > 0 ? tanh_of(scores / p.soft_cap) * p.soft_cap : scores;
}

// Turns a chunk's scores into weights, in place, and returns the factor for what was summed before.
inline float soften(float* scores, int64_t chunk_start, Row& row, const Problem& p) {
  vf best = splat(-INFINITY);
  vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (int64_t j = 0; j < CHUNK; j += LANES) {
    vi key = lane + (int32_t)(chunk_start + j);
    vi seen = (key >= (int32_t)row.first_key) & (key < (int32_t)row.last_key);
    vf s = select(seen, scaled(load(scores + j), p), splat(-INFINITY));
    store(scores + j, s);
    best = larger(s, best);
  }
  float highest = max_lanes(best);
  if (highest == -INFINITY) {
    memset(scores, 0, CHUNK * sizeof(float));
    return 1.0f;
  }
  float next = highest > row.best ? highest : row.best;
  float factor = row.best == -INFINITY ? 0.0f : exp_of(splat(row.best - next))[0];
  vf sum = {};
  for (int64_t j = 0; j < CHUNK; j += LANES) {
    vf w = exp_of(load(scores + j) - next);
    store(scores + j, w);
    sum += w;
  }
  row.mass = row.mass * factor + sum_lanes(sum);
  row.best = next;
  return factor;
}

// NV: vectors per head, 0 for a number known only at run time.
template <class T, int NV>
void attend(const Problem& p, const Task& task, int num_rows, Row* rows, const T* const* queries, T* const* outs) {
  const int64_t nv = NV ? NV : (p.head_size + LANES - 1) / LANES, dim = p.head_size;
  constexpr int ROOM = NV ? NV : 64;
  vf query[MAX_ROWS][ROOM], acc[MAX_ROWS][ROOM];
  float scores[MAX_ROWS][CHUNK];
  auto part = [&](const T* at, int64_t v) {
    return NV ? load(at + v * LANES) : load_part(at + v * LANES, dim - v * LANES);
  };
  for (int m = 0; m < num_rows; ++m)
    for (int64_t v = 0; v < nv; ++v) query[m][v] = part(queries[m], v), acc[m][v] = vf{};

  const int32_t* table = p.block_table + task.request * p.table_stride;
  const int64_t page = p.block_size * dim, half = p.num_blocks * p.num_kv_heads * page;
  const T* cache = (const T*)p.cache;
  auto key_at = [&](int64_t key) {
    int64_t block = table[key / p.block_size];
    return cache + (block * p.num_kv_heads + task.kv_head) * page + (key % p.block_size) * dim;
  };
  const int64_t begin = rows[0].first_key, end = rows[num_rows - 1].last_key;
  for (int64_t start = begin / CHUNK * CHUNK; start < end; start += CHUNK) {
    const int64_t from = start > begin ? start : begin, to = start + CHUNK < end ? start + CHUNK : end;
    for (int m = 0; m < num_rows; ++m) memset(scores[m], 0, sizeof scores[m]);
    for (int64_t key = from; key < to; ++key) {
      const T* k = key_at(key);
      vf dot[MAX_ROWS] = {};
      for (int64_t v = 0; v < nv; ++v) {
        vf keys = part(k, v);
        for (int m = 0; m < num_rows; ++m) dot[m] += query[m][v] * keys;
      }
      for (int m = 0; m < num_rows; ++m) scores[m][key - start] = sum_lanes(dot[m]);
    }
    for (int m = 0; m < num_rows; ++m) {
      float factor = soften(scores[m], start, rows[m], p);
      if (factor != 1.0f)
        for (int64_t v = 0; v < nv; ++v) acc[m][v] *= factor;
    }
    for (int64_t key = from; key < to; ++key) {
      const T* at = key_at(key) + half;
      vf values[ROOM];
      for (int64_t v = 0; v < nv; ++v) values[v] = part(at, v);
      for (int m = 0; m < num_rows; ++m) {
        // A weight of 0 must not meet the NaN of a value that the row does not see.
        if (key < rows[m].first_key || key >= rows[m].last_key) continue;
        for (int64_t v = 0; v < nv; ++v) acc[m][v] += scores[m][key - start] * values[v];
      }
    }
  }
  for (int m = 0; m < num_rows; ++m)
    for (int64_t v = 0; v < nv; ++v) store_part(outs[m] + v * LANES, acc[m][v] / rows[m].mass, dim - v * LANES);
}

template <class T>
void attend_any(const Problem& p, const Task& task, int num_rows, Row* rows, const T* const* queries, T* const* outs) {
  switch (p.head_size) {
    case 64: return attend<T, 4>(p, task, num_rows, rows, queries, outs);
    case 80: return attend<T, 5>(p, task, num_rows, rows, queries, outs);
    case 96: return attend<T, 6>(p, task, num_rows, rows, queries, outs);
    case 128: return attend<T, 8>(p, task, num_rows, rows, queries, outs);
    case 256: return attend<T, 16>(p, task, num_rows, rows, queries, outs);
    default: return attend<T, 0>(p, task, num_rows, rows, queries, outs);
  }
}

template <class T>
void run(const Problem& p, const Task& task) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t first = p.query_start[task.request], length = p.query_start[task.request + 1] - first;
  const int64_t computed = p.seq_lens[task.request] - length;
  Row rows[MAX_ROWS];
  const T* queries[MAX_ROWS];
  T* outs[MAX_ROWS];
  int count = 0;
  for (int64_t r = 0; r < task.num_tokens * group; ++r) {
    const int64_t token = task.token + r / group, head = task.kv_head * group + r % group;
    const int64_t seen = computed + token + 1;
    rows[count] = {p.window && seen > p.window ? seen - p.window : 0, seen, -INFINITY, 0.0f};
    queries[count] = (const T*)p.query + (first + token) * p.query_stride + head * p.head_size;
    outs[count] = (T*)p.out + ((first + token) * p.num_heads + head) * p.head_size;
    if (++count == MAX_ROWS || r + 1 == task.num_tokens * group) {
      attend_any(p, task, count, rows, queries, outs);
      count = 0;
    }
  }
}

std::vector<Task> tasks_of(const Problem& p) {
  const int64_t group = p.num_heads / p.num_kv_heads;
  const int64_t tile = group >= MAX_ROWS ? 1 : MAX_ROWS / group;
  std::vector<Task> tasks;
  for (int64_t request = 0; request < p.num_requests; ++request) {
    const int64_t length = p.query_start[request + 1] - p.query_start[request];
    for (int64_t token = length > 0 ? (length - 1) / tile * tile : -1; token >= 0; token -= tile)
      for (int64_t head = 0; head < p.num_kv_heads; ++head)
        tasks.push_back({request, head, token, length - token < tile ? length - token : tile});
  }
  return tasks;
}

template <class T>
void write_rows(T* cache, const T* key, const T* value, int64_t key_stride, int64_t value_stride, const int64_t* slots,
                int64_t num_tokens, int64_t num_blocks, int64_t block_size, int64_t heads, int64_t dim) {
  const int64_t half = num_blocks * heads * block_size * dim;
  for (int64_t t = 0; t < num_tokens; ++t)
    for (int64_t head = 0; head < heads; ++head) {
      T* at = cache + ((slots[t] / block_size * heads + head) * block_size + slots[t] % block_size) * dim;
      memcpy((void*)at, key + t * key_stride + head * dim, dim * sizeof(T));
      memcpy((void*)(at + half), value + t * value_stride + head * dim, dim * sizeof(T));
    }
}

}  // namespace

PM_EXPORT void pm_paged_attention(void* out, const void* query, const void* cache, const int32_t* query_start,
                                  const int32_t* seq_lens, const int32_t* block_table, int64_t query_stride,
                                  int64_t num_requests, int64_t table_stride, int64_t num_blocks, int64_t block_size,
                                  int64_t num_heads, int64_t num_kv_heads, int64_t head_size, int64_t window,
                                  double scale, double soft_cap, int64_t dtype, int64_t threads) {
  const Problem p = {out,          query,        cache,      query_start, seq_lens,  block_table,
                     query_stride, num_requests, table_stride, num_blocks, block_size, num_heads,
                     num_kv_heads, head_size,    window,     (float)scale, (float)soft_cap};
  const std::vector<Task> tasks = tasks_of(p);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (size_t i = 0; i < tasks.size(); ++i) {
    if (dtype == BFLOAT16) run<bf16>(p, tasks[i]);
    else run<float>(p, tasks[i]);
  }
}

PM_EXPORT void pm_write_kv(void* cache, const void* key, const void* value, const int64_t* slots, int64_t key_stride,
                           int64_t value_stride, int64_t num_tokens, int64_t num_blocks, int64_t block_size,
                           int64_t num_kv_heads, int64_t head_size, int64_t dtype) {
  if (dtype == BFLOAT16)
    write_rows((bf16*)cache, (const bf16*)key, (const bf16*)value, key_stride, value_stride, slots, num_tokens,
               num_blocks, block_size, num_kv_heads, head_size);
  else
    write_rows((float*)cache, (const float*)key, (const float*)value, key_stride, value_stride, slots, num_tokens,
               num_blocks, block_size, num_kv_heads, head_size);
}
