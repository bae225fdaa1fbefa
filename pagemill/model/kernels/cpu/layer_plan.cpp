// Runs a planned sequence of operations in one parallel region: a step of few rows with a barrier of our own after each
// operation that others wait for, a few hundred of them in thirty layers; one of many rows as waves.h says. Compiled for
// the baseline.
#include "layer_plan.h"

#include <algorithm>
#include <cstddef>
#include <new>

#include "attention_plan.h"
#include "barrier.h"
#include "experts_plan.h"
#include "plan_rows.h"
#include "waves.h"

namespace {

// Up to so many rows, every thread computes the norms that it needs itself: that is sooner done than waited for.
constexpr int64_t MAX_OWN_ROWS = 4;
// From so many rows on, the inputs of integer layers are quantized by all threads together.
constexpr int64_t MIN_SHARED_ROWS = 16;
// From so many rows on, and so many for each thread, threads share the rows of a linear layer and not its panels: reading
// all weights in each thread is then cheaper than reading inputs that another one has just written.
constexpr int64_t MIN_SPLIT_ROWS = 192, MIN_ROWS_PER_THREAD = 24;
// Of the weights that come next, while a thread waits for the others.
constexpr int64_t PREFETCH_BYTES = 192 * 1024;

Share share_of(int64_t count, int64_t rank, int64_t threads) {
  return {count * rank / threads, count * (rank + 1) / threads};
}

thread_local ThreadBuffer scratch_memory, partial_memory, queue_memory, own_memory, quantized_memory, counter_memory,
    found_memory, stage_memory, missing_memory, writer_memory;

constexpr int64_t MAX_PLANS = 64;

// The attention plans of one step: layers of equal sizes, window and batch share one.
class AttentionPlans {
 public:
  ~AttentionPlans() {
    for (int64_t i = 0; i < count_; ++i) plan(i)->~AttentionPlan();
  }

  // Its number, built when it is new; -1: out of memory.
  int64_t find(const PmOp& op, const PmRun& run, TileOrder order = LONGEST_FIRST) {
    for (int64_t i = 0; i < count_; ++i)
      if (batches_[i] == run.batches[op.group] && memcmp(&args_[i].layer, &op.layer, offsetof(PmLayer, sinks)) == 0) return i;
    if (count_ == MAX_PLANS) return -1;
    args_[count_] = {{}, *run.batches[op.group], op.layer};
    batches_[count_] = run.batches[op.group];
    AttentionPlan* made = new (storage_ + count_ * sizeof(AttentionPlan)) AttentionPlan(args_[count_], memory_[count_]);
    return made->build(order) ? count_++ : -1;
  }

  const AttentionPlan* plan(int64_t i) const { return (const AttentionPlan*)(storage_ + i * sizeof(AttentionPlan)); }

 private:
  AttentionArgs args_[MAX_PLANS];
  const PmBatch* batches_[MAX_PLANS];
  static thread_local ThreadBuffer memory_[MAX_PLANS];
  alignas(AttentionPlan) char storage_[MAX_PLANS * sizeof(AttentionPlan)];
  int64_t count_ = 0;
};

thread_local ThreadBuffer AttentionPlans::memory_[MAX_PLANS];

// What an operation hands out piece by piece.
struct Queues {
  WorkQueue first, second;
};

class PlanRun : PlanRows {
 public:
  PlanRun(const PmOp* ops, int64_t num_ops, const PmRun& run, int64_t threads)
      : PlanRows(run), ops_(ops), num_ops_(num_ops), threads_(threads) {}

  // False: out of memory.
  bool prepare() {
    int64_t widest = 0, num_attend = 0;
    for (int64_t i = 0; i < num_ops_; ++i) {
      const PmOp& op = ops_[i];
      if (op.kind == PM_OP_NORM && run_.widths[op.out] > widest) widest = run_.widths[op.out];
      if (op.kind == PM_OP_ATTEND) ++num_attend;
    }
    own_rows_ = run_.num_tokens <= MAX_OWN_ROWS;
    own_stride_ = scratch_stride(widest * MAX_OWN_ROWS * 2 * 2);
    own_ = (char*)own_memory.reserve(own_stride_ * threads_ + 1);
    queues_ = (Queues*)queue_memory.reserve((num_attend + 1) * (int64_t)sizeof(Queues));
    quantized_ = (char*)quantized_memory.reserve(quantized_bytes() + 1);
    counters_ = (Shares::Counter*)counter_memory.reserve(2 * threads_ * (int64_t)sizeof(Shares::Counter));
    found_ = (ArgmaxResult*)found_memory.reserve(run_.num_tokens * threads_ * (int64_t)sizeof(ArgmaxResult));
    return own_ && queues_ && quantized_ && counters_ && found_ && experts_.prepare(ops_, num_ops_, run_, threads_) &&
           prepare_attention() && prepare_waves(num_attend);
  }

  // Once, by one of the threads, when their number is known: it may be less than what was asked for.
  void set_team(int64_t threads) {
    team_ = threads;
    barrier_.set_team(threads);
    for (int64_t i = 0; i < 2 * team_; ++i) new (counters_ + i) Shares::Counter;
  }

  void work(int64_t rank) {
    if (in_waves_) return work_in_waves(rank);
    OwnNorm own = {own_ + rank * own_stride_, -1, 0};
    int64_t attend = 0, linear = 0;
    for (int64_t i = 0; i < num_ops_; ++i) {
      const PmOp& op = ops_[i];
      switch (op.kind) {
        case PM_OP_NORM:
          if (own_rows_ && i + 1 < num_ops_) {
            norm_own(op, rank, own);
            continue;  // nobody reads it but this thread
          }
          norm(op, rank, own);
          break;
        case PM_OP_LINEAR:
          this->linear(op, rank, own, linear++);
          break;
        case PM_OP_ADD:
          add(op, share_of(run_.num_tokens, rank, team_), own_rows_ ? &own : nullptr);
          break;
        case PM_OP_SCALE:
          scale(op, share_of(run_.num_tokens * run_.widths[op.out], rank, team_), own_rows_ ? &own : nullptr);
          break;
        case PM_OP_SOFT_CAP:
          soft_cap(op, share_of(run_.num_tokens * run_.widths[op.out], rank, team_));
          break;
        case PM_OP_NORM_PARTS:
          norm_parts(op, share_of(run_.num_tokens * parts_of(op), rank, team_));
          break;
        case PM_OP_STREAMS:
          streams(op, rank, own);
          break;
        case PM_OP_EXPERTS:
          experts(op, rank, own, linear);
          break;
        case PM_OP_PREPARE_LATENT:
          run_rows(op, share_of(run_.num_tokens, rank, team_));
          continue;
        case PM_OP_HEADS:
          heads(op, rank, linear++);
          break;
        case PM_OP_ATTEND:
          this->attend(op, rank, attend++);
          break;
        case PM_OP_CHOOSE:
          choose(op, rank, attend);
          break;
        default:
          run_rows(op, share_of(run_.num_tokens, rank, team_));
      }
      barrier_.wait(next_weights(i + 1, rank));
    }
  }

 private:
  // Of the first linear layer from operation i on, what this thread begins with.
  Prefetch next_weights(int64_t i, int64_t rank) const {
    while (i < num_ops_ && ops_[i].kind != PM_OP_LINEAR) ++i;
    if (i == num_ops_) return {nullptr, 0};
    const PmLinear& linear = ops_[i].linear;
    return panels_of(linear, share_of(num_panels(linear), rank, team_));
  }

  // The same of the layers of all experts that have places.
  Prefetch next_expert(const PmLinear* layers, const ExpertPlaces& places, int64_t rank) const {
    const int64_t panels = num_panels(layers[0]), begin = share_of(*places.num_used * panels, rank, team_).begin;
    if (begin == *places.num_used * panels) return {nullptr, 0};
    return panels_of(layers[places.used[begin / panels]], {begin % panels, panels});
  }

  static Prefetch panels_of(const PmLinear& linear, Share share) {
    const int64_t bytes = (share.end - share.begin) * panel_bytes(linear);
    return {(const char*)linear.weight + share.begin * panel_bytes(linear), bytes < PREFETCH_BYTES ? bytes : PREFETCH_BYTES};
  }

  int64_t quantized_bytes() const {
    int64_t most = 0;
    for (int64_t i = 0; i < num_ops_ && run_.num_tokens >= MIN_SHARED_ROWS; ++i) {
      if (ops_[i].kind != PM_OP_LINEAR) continue;
      const int64_t bytes = selected->quantized_bytes({ops_[i].linear, nullptr, nullptr, run_.num_tokens});
      if (bytes > most) most = bytes;
    }
    return most;
  }

  // Whether rows are shared, if attention can be too. Experts are shared by their panels: each would else be read again for
  // every few rows that chose it.
  bool splits_rows() const {
    return !experts_.any() && threads_ > 1 && run_.num_tokens >= MIN_SPLIT_ROWS && run_.num_tokens >= MIN_ROWS_PER_THREAD * threads_;
  }

  bool prepare_waves(int64_t num_attend) {
    in_waves_ = splits_rows() && !splits_keys_ && !run_.choice;  // waves know layers only
    if (!in_waves_) return true;
    auto* stages = (WaveStage*)stage_memory.reserve((2 * num_attend + 1) * (int64_t)sizeof(WaveStage));
    if (!stages) return false;
    int64_t count = 0, first = 0;
    for (int64_t i = 0; i < num_ops_; ++i) {
      const PmOp& op = ops_[i];
      if (op.kind != PM_OP_ATTEND) continue;
      stages[count++] = {first, i, nullptr, 0};
      stages[count++] = {i, i + 1, plans_.plan(plans_.find(op, run_)), op.layer.num_kv_heads};
      first = i + 1;
    }
    stages[count++] = {first, num_ops_, nullptr, 0};
    return waves_.prepare(stages, count, run_.num_tokens, threads_, missing_memory, writer_memory);
  }

  bool prepare_attention() {
    int64_t scratch = 0, partials = 0, attend = 0;
    for (int64_t i = 0; i < num_ops_; ++i) {
      const PmOp& op = ops_[i];
      if (op.kind != PM_OP_ATTEND) continue;
      const int64_t found = plans_.find(op, run_, splits_rows() ? AS_IN_BATCH : LONGEST_FIRST);
      if (found < 0) return false;
      const AttentionPlan& plan = *plans_.plan(found);
      const int64_t heads = op.layer.num_kv_heads, bytes = selected->attention_scratch_bytes(attention_args(op));
      if (bytes > scratch) scratch = bytes;
      if (plan.partials * heads > partials) partials = plan.partials * heads;
      const bool split = splits_keys(plan, op.layer, threads_);
      splits_keys_ |= split;
      new (queues_ + attend++) Queues{WorkQueue(split ? plan.segments * heads : plan.count * heads),
                                      WorkQueue(split ? plan.count * heads : 0)};
    }
    // Of the choice, if there is one.
    const int64_t rows = run_.num_tokens;
    new (queues_ + attend) Queues{WorkQueue(rows < threads_ ? rows * threads_ : rows), WorkQueue(0)};
    scratch_stride_ = scratch_stride(scratch);
    scratch_ = (char*)scratch_memory.reserve(scratch_stride_ * threads_ + 1);
    partials_ = (float*)partial_memory.reserve(partials * (int64_t)sizeof(float) + 1);
    return scratch_ && partials_;
  }

  void work_in_waves(int64_t rank) {
    WaveCursor at;
    for (WaveTask task = waves_.take(at), next; task.stage >= 0; task = next) {
      const WaveStage& stage = waves_.stage(task);
      // A short task is followed by one that is known already, so that it can be fetched meanwhile.
      if (stage.plan) next = waves_.take(at);
      waves_.wait_for_needs(task);
      if (stage.plan && !(waves_.is_last(task) && is_unwanted(waves_.tile_of(task)))) {
        const TileHead then = next.stage == task.stage ? stage.plan->tile_head(next.index, stage.heads) : TileHead();
        selected->attend(attention_args(ops_[stage.first]), waves_.tile_of(task), task.index % stage.heads, then,
                         scratch_ + rank * scratch_stride_);
      } else if (!stage.plan) {
        const Share rows = {waves_.chunks().begin(task.index), waves_.chunks().begin(task.index + 1)};
        waves_.is_last(task) && run_.wanted ? work_on_wanted(stage, rows) : work_on_rows(stage, rows);
      }
      waves_.finish(task);
      if (!stage.plan) next = waves_.take(at);
    }
  }

  // The first of the wanted rows that is not before `row`, as its number.
  int64_t wanted_from(int64_t row) const {
    return std::lower_bound(run_.wanted, run_.wanted + run_.num_wanted, row) - run_.wanted;
  }

  bool is_unwanted(const Tile& tile) const {
    return run_.wanted && wanted_from(tile.token) == wanted_from(tile.token + tile.num_tokens);
  }

  void work_on_wanted(const WaveStage& stage, Share rows) const {
    for (int64_t i = wanted_from(rows.begin), next, last = wanted_from(rows.end); i < last; i = next) {
      for (next = i + 1; next < last && run_.wanted[next] == run_.wanted[next - 1] + 1;) ++next;
      work_on_rows(stage, {run_.wanted[i], run_.wanted[next - 1] + 1});
    }
  }

  void work_on_rows(const WaveStage& stage, Share rows) const {
    for (int64_t i = stage.first; i < stage.last; ++i) run_rows(ops_[i], rows);
  }

  void norm(const PmOp& op, int64_t rank, const OwnNorm& own) const {
    const Share share = share_of(run_.num_tokens, rank, team_);
    NormArgs args = norm_args(op, buffer(op.out), op.residual_out < 0 ? nullptr : buffer(op.residual_out));
    if (own_rows_ && op.in == own.buffer) {
      args.x = own.memory;
      args.x_stride = own.stride;
    }
    selected->norm(args, share.begin, share.end);
  }

  // The sum is needed by all in the end; the first thread keeps it where they find it, the others beside their result.
  void norm_own(const PmOp& op, int64_t rank, OwnNorm& own) const {
    const int64_t cols = run_.widths[op.out];
    element* out = (element*)own.memory;
    element* sum = out + MAX_OWN_ROWS * cols;
    NormArgs args = norm_args(op, out, op.residual_out >= 0 && rank == 0 ? buffer(op.residual_out) : sum);
    if (op.in == own.buffer) {  // a norm of a norm: its input is where the result will be
      memcpy(sum, out, run_.num_tokens * cols * sizeof(element));
      args.x = sum;
      args.x_stride = cols;
    }
    selected->norm(args, 0, run_.num_tokens);
    own.buffer = op.out;
    own.stride = cols;
    if (op.stored && rank == 0) memcpy(buffer(op.out), out, run_.num_tokens * cols * sizeof(element));
  }

  // Rows are cut where there are fewer than threads.
  void streams(const PmOp& op, int64_t rank, const OwnNorm& own) const {
    const int64_t rows = run_.num_tokens, pieces = rows < team_ ? team_ : 1;
    PlanRows::streams(op, share_of(rows * pieces, rank, team_), pieces, own_rows_ ? &own : nullptr);
  }

  // The `number`-th linear layer.
  void linear(const PmOp& op, int64_t rank, const OwnNorm& own, int64_t number) {
    LinearArgs args = linear_args(op);
    if (own_rows_ && op.in == own.buffer) {
      args.x = own.memory;
      args.x_stride = own.stride;
    }
    if (run_.num_tokens < MIN_SHARED_ROWS) {
      quantize_own(args);
    } else if (selected->quantized_bytes(args)) {
      args.quantized = quantized_;
      const Share rows = share_of(run_.num_tokens, rank, team_);
      selected->quantize_rows(args, rows.begin, rows.end);
      barrier_.wait();
    }
    share_panels(num_panels(op.linear), rank, number,
                 [&](int64_t begin, int64_t end) { selected->linear(args, begin, end); });
  }

  // body(begin, end) of panels of the `number`-th layer, or set of layers, that is shared so.
  template <class F>
  void share_panels(int64_t panels, int64_t rank, int64_t number, F body) {
    // The counters of the layer before are free again since the barrier after it.
    Shares::Counter *now = counters_ + number % 2 * team_, *next = counters_ + (number + 1) % 2 * team_;
    next[rank].gone.store(0, std::memory_order_relaxed);
    Shares(now, panels, team_, panels_at_a_time(panels / team_)).run(rank, body);
  }

  void experts(const PmOp& op, int64_t rank, const OwnNorm& own, int64_t& number) {
    const PmExperts& experts = *op.experts;
    const int64_t width = run_.widths[op.in];
    const bool own_places = run_.num_tokens * experts.top_k <= MAX_OWN_CHOICES;
    const element* x = (const element*)normed_or(op.in, own_rows_ ? &own : nullptr);
    for (int64_t first = 0; first < run_.num_tokens; first += EXPERT_ROWS) {
      const int64_t rows = std::min(run_.num_tokens - first, EXPERT_ROWS);
      const float* routed = (const float*)run_.buffers[op.residual_in] + first * run_.widths[op.residual_in];
      const ExpertPlaces places = experts_.places(experts, rows, own_places ? rank : 0);
      if (first) barrier_.wait();  // places, and what experts gave, are written again
      if (own_places || rank == 0) ExpertRows::sort(experts, routed, rows, places);
      if (!own_places) barrier_.wait();
      share_experts(experts.gate_up, places, rank, number++, [&](int64_t expert) {
        return experts_.up_args(experts, places, expert, x + first * width, routed, width);
      });
      barrier_.wait(next_expert(experts.down, places, rank));
      share_experts(experts.down, places, rank, number++, [&](int64_t expert) {
        return experts_.down_args(experts, places, expert, width);
      });
      barrier_.wait(next_weights(&op - ops_, rank));
      sum_experts(op, places, {first, first + rows}, rank);
    }
  }

  // The same layer of all experts that have places.
  template <class F>
  void share_experts(const PmLinear* layers, const ExpertPlaces& places, int64_t rank, int64_t number, F args_of) {
    share_layers(num_panels(layers[0]), *places.num_used, rank, number, [&](int64_t i) { return args_of(places.used[i]); });
  }

  void heads(const PmOp& op, int64_t rank, int64_t number) {
    const PmHeads& heads = *op.heads;
    share_layers(num_panels(heads.layers[0]), heads.count, rank, number, [&](int64_t h) { return head_args(op, h); });
  }

  // Of `count` layers of as many panels, the panels one after the other.
  template <class F>
  void share_layers(int64_t panels, int64_t count, int64_t rank, int64_t number, F args_of) {
    int64_t current = -1;
    LinearArgs args = {};
    share_panels(count * panels, rank, number, [&](int64_t begin, int64_t end) {
      for (int64_t next; begin < end; begin = next) {
        const int64_t i = begin / panels;
        next = std::min(end, (i + 1) * panels);
        if (i != current) {
          args = args_of(i);
          quantize_own(args);
          current = i;
        }
        selected->linear(args, begin - i * panels, next - i * panels);
      }
    });
  }

  // Rows are cut where there are fewer than threads.
  void sum_experts(const PmOp& op, const ExpertPlaces& places, Share rows, int64_t rank) const {
    const int64_t width = run_.widths[op.out], count = rows.end - rows.begin, pieces = count < team_ ? team_ : 1;
    const float* routed = (const float*)run_.buffers[op.residual_in] + rows.begin * run_.widths[op.residual_in];
    const Share share = share_of(count * pieces, rank, team_);
    for (int64_t i = share.begin; i < share.end; ++i) {
      const int64_t r = i / pieces, piece = i % pieces;
      const Share columns = {width * piece / pieces / LINEAR_PANEL * LINEAR_PANEL,
                             piece + 1 == pieces ? width : width * (piece + 1) / pieces / LINEAR_PANEL * LINEAR_PANEL};
      experts_.weigh(*op.experts, places, routed, r, row(op.out, rows.begin + r), width, columns);
    }
  }

  void attend(const PmOp& op, int64_t rank, int64_t number) {
    const AttentionArgs args = attention_args(op);
    const AttentionPlan& plan = *plans_.plan(plans_.find(op, run_));
    const int64_t heads = op.layer.num_kv_heads;
    char* own = scratch_ + rank * scratch_stride_;
    Queues& queues = queues_[number];
    if (!splits_keys(plan, op.layer, threads_)) {
      queues.first.run_ahead([&](int64_t i, int64_t next) {
        selected->attend(args, plan.tiles[i / heads], i % heads, plan.tile_head(next, heads), own);
      });
      return;
    }
    SegmentCursor at(plan, heads);
    queues.first.run([&](int64_t i) {
      at.seek(i);
      selected->attend_segment(args, at.tile(), at.head, first_segment(at.tile()) + at.segment, own,
                               partials_ + at.offset(plan));
    });
    barrier_.wait();
    queues.second.run([&](int64_t i) {
      const Tile& merged = plan.tiles[i / heads];
      const int64_t head = i % heads, floats = plan.partial_floats(merged);
      const float* from = partials_ + merged.partial * heads + head * num_segments(merged) * floats;
      selected->merge_segments(args, merged, head, from, own);
    });
  }

  // Few rows are cut into a piece for each thread, where they are greedy; drawing takes a thread for a row.
  // Its queue is the one after those of attention.
  void choose(const PmOp& op, int64_t rank, int64_t attend) {
    const PmChoice& choice = *run_.choice;
    const int64_t rows = run_.num_tokens, cols = run_.widths[op.in], pieces = rows < threads_ ? threads_ : 1;
    const float* logits = (const float*)run_.buffers[op.in];
    const ArgmaxArgs greedy = {logits, cols, cols, PM_FLOAT32, choice.masks};
    const SampleArgs drawn = {choice.tokens, logits, choice.temperature, choice.min_p, choice.top_k, choice.top_p,
                              choice.uniforms, cols, cols, choice.masks};
    queues_[attend].first.run([&](int64_t i) {
      const int64_t r = i / pieces, piece = i % pieces;
      if (choice.processed[r]) return;
      if (choice.greedy[r])
        found_[i] = selected->argmax(greedy, r, piece_begin(cols, piece, pieces), piece_begin(cols, piece + 1, pieces));
      else if (piece == 0)
        selected->sample(drawn, r, r + 1);
    });
    barrier_.wait();
    if (rank != 0) return;
    for (int64_t r = 0; r < rows; ++r) {
      if (choice.processed[r] || !choice.greedy[r]) continue;
      ArgmaxResult best = found_[r * pieces];
      for (int64_t p = 1; p < pieces; ++p) best = better_of(best, found_[r * pieces + p]);
      choice.tokens[r] = (int32_t)token_of(best);
    }
  }

  // At whole words of a mask, but for the end.
  static int64_t piece_begin(int64_t cols, int64_t piece, int64_t pieces) {
    return piece == pieces ? cols : cols * piece / pieces / MASK_BITS * MASK_BITS;
  }

  const PmOp* ops_;
  const int64_t num_ops_;
  const int64_t threads_;
  int64_t team_ = 1;
  Barrier barrier_;
  AttentionPlans plans_;
  ExpertRows experts_;
  Queues* queues_ = nullptr;
  char* quantized_ = nullptr;
  Shares::Counter* counters_ = nullptr;
  ArgmaxResult* found_ = nullptr;
  char* own_ = nullptr;
  int64_t own_stride_ = 0;
  bool own_rows_ = false;
  char* scratch_ = nullptr;
  int64_t scratch_stride_ = 0;
  float* partials_ = nullptr;
  bool splits_keys_ = false, in_waves_ = false;
  Waves waves_;
};

}  // namespace

int pm_run_plan(const PmOp* ops, int64_t num_ops, const PmRun* run, int64_t threads) {
  if (threads < 1) threads = 1;
  PlanRun plan(ops, num_ops, *run, threads);
  if (!plan.prepare()) return 1;
  if (threads == 1) {
    plan.set_team(1);
    plan.work(0);
    return 0;
  }
#pragma omp parallel num_threads((int)threads)
  {
#pragma omp single
    plan.set_team(omp_get_num_threads());
    plan.work(omp_get_thread_num());
  }
  return 0;
}
