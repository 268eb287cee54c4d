// The CUDA kernels, run by the emulator, against the CPU kernels: every kernel on shapes that take each of its paths,
// in several orders of blocks and threads. Meant for the sanitizers, the race detector above all; the full list of
// samples runs through Python (emulated.py). Buffers have their exact size and start as NaN.
#include "kernels/decode.h"
#include "kernels/embedding.h"
#include "kernels/embedding_fp8.h"
#include "kernels/embedding_int8.h"
#include "kernels/gate.h"
#include "kernels/gate_conv.h"
#include "kernels/ngram_hash.h"
#include "kernels/row_update.h"
#include "kernels/short_conv.h"

#include "cuda_emulator.h"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace engram;

std::mt19937_64 rng(0);
int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }

template <typename T> struct Buffer {
  T* memory;
  T* data;  // `shift` elements behind an address that is aligned for every access
  int64_t n;
  explicit Buffer(int64_t count, int64_t shift = 0)
      : memory(static_cast<T*>(std::malloc((count + shift) * sizeof(T)))), data(memory + shift), n(count) {
    std::memset(static_cast<void*>(memory), 0xff, (count + shift) * sizeof(T));
  }
  ~Buffer() { std::free(memory); }
  Buffer(const Buffer&) = delete;
  T& operator[](int64_t i) { return data[i]; }
  void normal(double mean = 0) {
    for (int64_t i = 0; i < n; ++i)
      data[i] = static_cast<T>(static_cast<float>(std::normal_distribution<double>(mean)(rng)));
  }
  void integers(int64_t low, int64_t high) {
    for (int64_t i = 0; i < n; ++i) data[i] = static_cast<T>(uniform(low, high));
  }
};

int failures = 0;
void check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED %s\n", what.c_str());
}
void check(cudaError_t error, const std::string& what) {
  check(error == cudaSuccess, what + ": error " + std::to_string(error));
}

template <typename T> const char* name_of() {
  return std::is_same_v<T, double>  ? "float64"
         : std::is_same_v<T, float> ? "float32"
         : std::is_same_v<T, Half>  ? "float16"
                                    : "bfloat16";
}
template <typename T>
constexpr double kTolerance = std::is_same_v<T, double>  ? 1e-12
                              : std::is_same_v<T, float> ? 2e-6
                              : std::is_same_v<T, Half>  ? 1e-3
                                                         : 8e-3;

// Norm-wise.
template <typename T> void compare(Buffer<T>& got, Buffer<T>& expected, const std::string& what, double times = 1) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < got.n; ++i) {
    const double e = static_cast<double>(expected[i]), d = static_cast<double>(got[i]) - e;
    error += d * d;
    size += e * e;
  }
  check(std::sqrt(error) <= times * kTolerance<T> * std::sqrt(size),
        what + " " + name_of<T>() + ": relative error " + std::to_string(std::sqrt(error / size)));
}

// ---- Hash ----

void test_hash(int64_t B, int64_t T, int64_t L, int64_t N, int64_t heads, bool map, bool documents, bool masked,
               bool history) {
  const int64_t C = (N - 1) * heads, V = 40;
  Buffer<int64_t> ids(B * T), multipliers(L * N), moduli(L * C), offsets(L * C), document_ids(B * T), past(B * (N - 1));
  Buffer<int32_t> token_map(V);
  Buffer<bool> mask(B * T);
  Buffer<int64_t> got(L * B * T * C), expected(L * B * T * C);
  if (map) ids.integers(0, V - 1);
  else ids.integers(INT64_MIN, INT64_MAX);
  multipliers.integers(INT64_MIN, INT64_MAX);
  for (int64_t i = 0; i < L * C; ++i)
    moduli[i] = (uniform(0, 1) ? 1 : INT64_MAX / 2) >> uniform(0, 61), moduli[i] += moduli[i] == 0;
  offsets.integers(0, 1000);
  token_map.integers(0, 20);
  document_ids.integers(0, 1);
  past.integers(-1, V - 1);
  for (int64_t i = 0; i < B * T; ++i) mask[i] = uniform(0, 5) > 0;
  if (map && masked)
    for (int64_t i = 0; i < B * T; ++i) ids[i] = mask[i] ? ids[i] : INT64_MIN;  // what is masked is never read
  NgramHash a{ids.data,
              multipliers.data,
              moduli.data,
              offsets.data,
              map ? token_map.data : nullptr,
              documents ? document_ids.data : nullptr,
              masked ? mask.data : nullptr,
              history ? past.data : nullptr,
              expected.data,
              map ? token_map[2] : 2,
              B,
              T,
              L,
              N,
              C,
              map ? V : 0};
  check(cpu::ngram_hash(a, 0, B * T) == kNoBadId, "ids inside the map");
  a.rows = got.data;
  a.pad = 2;
  int32_t bad = 0;
  check(cuda::ngram_hash(a, &bad, nullptr), "ngram_hash");
  check(!bad && !std::memcmp(got.data, expected.data, got.n * sizeof(int64_t)), "ngram_hash differs from the CPU");
  if (!map || B * T == 0) return;
  ids[B * T / 2] = V;  // counts as masked, and is reported
  mask[B * T / 2] = true;
  check(cuda::ngram_hash(a, &bad, nullptr), "ngram_hash");
  a.rows = expected.data;
  a.pad = token_map[2];
  cpu::ngram_hash(a, 0, B * T);
  check(bad == 1 && !std::memcmp(got.data, expected.data, got.n * sizeof(int64_t)), "ngram_hash with a bad id");
}

// ---- Embedding ----

template <typename T, typename Index>
void test_embedding(int64_t tokens, int64_t C, int64_t R, int64_t d, bool shard, bool masked, int64_t hot,
                    int64_t shift) {
  const int64_t slots = tokens * C, first = shard ? 100 : 0;
  const std::string what = "embedding " + std::to_string(slots) + "x" + std::to_string(d);
  Buffer<T> table(R * d, shift), got(slots * d, shift), expected(slots * d);
  Buffer<Index> rows(slots);
  Buffer<bool> mask(tokens);
  table.normal();
  rows.integers(first - (shard ? R / 2 : 0), first + R - 1 + (shard ? R / 2 : 0));
  for (int64_t i = 0; i < slots; ++i)
    if (uniform(0, 99) < hot) rows[i] = static_cast<Index>(first + R / 2);
  for (int64_t i = 0; i < tokens; ++i) mask[i] = uniform(0, 3) > 0;
  EmbeddingForward<Index> f{reinterpret_cast<const char*>(table.data),
                            rows.data,
                            masked ? mask.data : nullptr,
                            reinterpret_cast<char*>(expected.data),
                            slots,
                            C,
                            R,
                            d * static_cast<int64_t>(sizeof(T)),
                            first,
                            shard};
  check(cpu::embedding_forward(f, 0, slots) == kNoBadRow, "rows inside");
  f.out = reinterpret_cast<char*>(got.data);
  int32_t bad = 0;
  check(cuda::embedding_forward(f, &bad, nullptr), what);
  check(!bad && !std::memcmp(got.data, expected.data, slots * d * sizeof(T)), what + " forward");
}

// ---- Embedding of quantised rows ----

// Both ops to the bit: Fp8 says which.
template <bool Fp8, typename T, typename Index>
void test_quantized(int64_t tokens, int64_t C, int64_t R, int64_t d, bool shard, bool masked, int64_t shift) {
  const int64_t slots = tokens * C, first = shard ? 100 : 0, blocks = (d + kFp8Block - 1) / kFp8Block;
  const std::string what = (Fp8 ? "embedding_fp8 " : "embedding_int8 ") + std::to_string(slots) + "x" +
                           std::to_string(d) + " " + name_of<T>();
  Buffer<uint8_t> values(R * d, shift), bytes(R * blocks);
  Buffer<float> scales(R);
  Buffer<T> got(slots * d, shift), expected(slots * d);
  Buffer<Index> rows(slots);
  Buffer<bool> mask(tokens);
  for (int64_t i = 0; i < R * d; ++i) {
    values[i] = static_cast<uint8_t>(uniform(0, 255));
    if (Fp8 && (values[i] & 127) == 127) values[i] = 0;  // a NaN has many forms
  }
  bytes.integers(0, 254);
  scales.normal();
  rows.integers(first - (shard ? R / 2 : 0), first + R - 1 + (shard ? R / 2 : 0));
  for (int64_t i = 0; i < tokens; ++i) mask[i] = uniform(0, 3) > 0;
  const bool* visible = masked ? mask.data : nullptr;
  int32_t bad = 0;
  if constexpr (Fp8) {
    EmbeddingFp8<T, Index> f{values.data, bytes.data, rows.data, visible, expected.data, slots,
                             C,           R,          d,         blocks,  first,         shard};
    check(cpu::embedding_fp8(f, 0, slots) == kNoBadRow, "rows inside");
    f.out = got.data;
    check(cuda::embedding_fp8(f, &bad, nullptr), what);
  } else {
    EmbeddingInt8<T, Index> f{reinterpret_cast<const int8_t*>(values.data),
                              scales.data,
                              rows.data,
                              visible,
                              expected.data,
                              slots,
                              C,
                              R,
                              d,
                              first,
                              shard};
    check(cpu::embedding_int8(f, 0, slots) == kNoBadRow, "rows inside");
    f.out = got.data;
    check(cuda::embedding_int8(f, &bad, nullptr), what);
  }
  check(!bad && !std::memcmp(got.data, expected.data, slots * d * sizeof(T)), what + " differs from the CPU");
}

// ---- Row plan, row sum, row update ----

struct Plan {
  Buffer<int64_t> keys, runs, count;
  RowPlan view;
  explicit Plan(int64_t slots) : keys(slots), runs(slots + 1), count(1) {
    view = {keys.data, runs.data, count.data, slots, bits_of(slots)};
  }
};

template <typename Index> void plan_on_cpu(RowKeys<Index> k, Plan& plan) {
  k.keys = plan.keys.data;
  check(cpu::row_keys(k, 0, k.slots) == kNoBadRow, "rows inside");
  std::sort(plan.keys.data, plan.keys.data + k.slots);
  Buffer<int64_t> scratch(run_chunks(k.slots));
  const RowRuns r{plan.keys.data, plan.runs.data, plan.count.data, scratch.data, k.slots, k.table_rows, k.slot_bits};
  for (int64_t i = 0; i < run_chunks(k.slots); ++i) cpu::runs_count(r, i);
  cpu::runs_offsets(r);
  for (int64_t i = 0; i < run_chunks(k.slots); ++i) cpu::runs_write(r, i);
}

template <typename Index> void plan_on_cuda(RowKeys<Index> k, Plan& plan, const std::string& what) {
  const int end_bit = k.slot_bits + bits_of(k.table_rows);
  Buffer<int64_t> unsorted(k.slots), scratch(run_chunks(k.slots));
  Buffer<char> sort_scratch(static_cast<int64_t>(cuda::row_sort_bytes(k.slots, k.slot_bits, end_bit)));
  k.keys = unsorted.data;
  check(cuda::row_keys(k, nullptr), what);
  check(cuda::row_sort(unsorted.data, plan.keys.data, k.slots, k.slot_bits, end_bit, sort_scratch.data, sort_scratch.n,
                       nullptr),
        what);
  const RowRuns r{plan.keys.data, plan.runs.data, plan.count.data, scratch.data, k.slots, k.table_rows, k.slot_bits};
  check(cuda::row_runs(r, nullptr), what);
}

template <typename T> bool same(const Buffer<T>& a, const Buffer<T>& b, int64_t n) {
  return !std::memcmp(a.data, b.data, n * sizeof(T));
}
template <typename T> void copy(Buffer<T>& to, const Buffer<T>& from) {
  std::memcpy(static_cast<void*>(to.data), from.data, from.n * sizeof(T));
}

template <typename Index>
void test_row_plan(int64_t tokens, int64_t C, int64_t R, bool shard, bool masked, int64_t hot) {
  const int64_t slots = tokens * C, first = shard ? 100 : 0;
  const std::string what = "row_plan " + std::to_string(slots);
  Buffer<Index> rows(slots);
  Buffer<bool> mask(tokens);
  rows.integers(first - (shard ? R / 2 : 0), first + R - 1 + (shard ? R / 2 : 0));
  for (int64_t i = 0; i < slots; ++i)
    if (uniform(0, 99) < hot) rows[i] = static_cast<Index>(first + R / 2);
  for (int64_t i = 0; i < tokens; ++i) mask[i] = uniform(0, 3) > 0;
  const RowKeys<Index> k{rows.data, masked ? mask.data : nullptr, nullptr, slots, C, R, first, shard, bits_of(slots)};
  Plan got(slots), expected(slots);
  plan_on_cpu(k, expected);
  plan_on_cuda(k, got, what);
  const int64_t count = expected.count[0];
  check(same(got.keys, expected.keys, slots), what + " keys");
  check(got.count[0] == count && same(got.runs, expected.runs, slots + 1), what + " runs");
}

struct Rule {
  RowRule rule;
  bool first, second, per_row;
};
const Rule kRules[] = {{RowRule::sgd, false, false, false},   {RowRule::sgd, true, false, false},
                       {RowRule::adagrad, false, true, true}, {RowRule::adam, true, true, false},
                       {RowRule::adam, true, true, true},     {RowRule::adam, false, true, false},
                       {RowRule::adam, false, true, true}};

// One step of each rule, along `plan` or, without one, on every row.
template <typename T>
void test_row_update(const Plan* plan, int64_t R, int64_t d, int64_t shift, const std::string& what) {
  using A = accumulate_t<T>;
  const int64_t slots = plan ? plan->view.slots : R;
  Buffer<T> table(R * d, shift), got(R * d, shift), expected(R * d), grad(slots * d, shift);
  Buffer<A> first(R * d), got_first(R * d, shift), expected_first(R * d);
  Buffer<A> partials((slots + cuda::kRowSumChunk - 1) / cuda::kRowSumChunk * 2 * d);
  Buffer<int64_t> step(1);
  step[0] = uniform(1, 5);
  const auto run = [&](RowUpdate<T> u, const Buffer<A>* second) {
    u.grad = grad.data, u.step = step.data, u.table_rows = R, u.dim = d;
    if (plan) u.plan = plan->view;
    const bool has_first = u.first;
    const int64_t n = second ? second->n : 0;
    Buffer<A> got_second(n, shift), expected_second(n);
    copy(got, table), copy(expected, table), copy(got_first, first), copy(expected_first, first);
    if (second) copy(got_second, *second), copy(expected_second, *second);
    u.table = expected.data, u.first = has_first ? expected_first.data : nullptr;
    u.second = second ? expected_second.data : nullptr;
    cpu::row_update(u, 0, slots);
    u.table = got.data, u.first = has_first ? got_first.data : nullptr;
    u.second = second ? got_second.data : nullptr;
    u.partials = plan ? partials.data : nullptr;
    check(cuda::row_update(u, nullptr), what);
    if (u.stochastic) check(same(got, expected, R * d), what + " rounds to other bits than the CPU");
    else compare(got, expected, what + " table");
    if (has_first) compare(got_first, expected_first, what + " first");
    if (second) compare(got_second, expected_second, what + " second", 2);  // the square of a sum
  };
  table.normal(), grad.normal(1), first.normal();
  for (const Rule& rule : kRules) {
    Buffer<A> second(rule.per_row ? R : R * d);
    second.normal();
    for (int64_t i = 0; i < second.n; ++i) second[i] = std::abs(second[i]);
    RowUpdate<T> u{};
    u.first = rule.first ? first.data : nullptr;
    u.rule = rule.rule, u.second_per_row = rule.per_row, u.maximize = uniform(0, 1);
    u.lr = 0.5, u.beta1 = 0.75, u.beta2 = 0.9, u.eps = 1e-3, u.weight_decay = 0.125;
    run(u, rule.second ? &second : nullptr);
  }
  if constexpr (std::is_same_v<T, BFloat16>) {  // numbers that float32 holds exactly: only the rounding is left
    grad.integers(-8, 8);
    for (int64_t i = 0; i < R * d; ++i) table[i] = static_cast<T>(static_cast<float>(uniform(-64, 64)) / 32);
    RowUpdate<T> u{};
    u.rule = RowRule::sgd, u.lr = 1.0 / 1024, u.stochastic = true, u.seed = rng();
    run(u, nullptr);
  }
}

template <typename T, typename Index>
void test_rows(int64_t tokens, int64_t C, int64_t R, int64_t d, bool shard, bool masked, int64_t hot, int64_t shift) {
  using A = accumulate_t<T>;
  const int64_t slots = tokens * C, first = shard ? 100 : 0;
  const std::string what = "rows " + std::to_string(slots) + "x" + std::to_string(d);
  Buffer<Index> rows(slots);
  Buffer<bool> mask(tokens);
  rows.integers(first - (shard ? R / 2 : 0), first + R - 1 + (shard ? R / 2 : 0));
  for (int64_t i = 0; i < slots; ++i)
    if (uniform(0, 99) < hot) rows[i] = static_cast<Index>(first + R / 2);
  for (int64_t i = 0; i < tokens; ++i) mask[i] = uniform(0, 3) > 0;
  Plan plan(slots);
  plan_on_cpu(
      RowKeys<Index>{rows.data, masked ? mask.data : nullptr, nullptr, slots, C, R, first, shard, bits_of(slots)},
      plan);

  const int64_t count = plan.count[0];
  Buffer<T> values(slots * d, shift), got(count * d, shift), expected(count * d), all(R * d, shift),
      all_expected(R * d);
  Buffer<A> partials((slots + cuda::kRowSumChunk - 1) / cuda::kRowSumChunk * 2 * d);
  Buffer<int64_t> got_rows(count), expected_rows(count);
  values.normal(1);  // so that long sums do not cancel
  RowSum<T> s{values.data, plan.view, expected_rows.data, expected.data, nullptr, INT64_MAX, d};
  cpu::row_sum(s, 0, slots);
  s.rows = got_rows.data, s.sums = got.data, s.partials = partials.data;
  check(cuda::row_sum(s, nullptr), what);
  check(same(got_rows, expected_rows, count), what + " touched rows");
  compare(got, expected, what + " sums");

  for (int64_t i = 0; i < R * d; ++i) all[i] = all_expected[i] = T(0.0f);
  s.rows = nullptr, s.table_rows = R, s.sums = all_expected.data;
  cpu::row_sum(s, 0, slots);
  s.sums = all.data;
  check(cuda::row_sum(s, nullptr), what);
  compare(all, all_expected, what + " scattered sums");

  test_row_update<T>(&plan, R, d, shift, what + " update");
  test_row_update<T>(nullptr, std::min<int64_t>(R, 12), d, shift, what + " update of every row");
}

#ifdef __SANITIZE_THREAD__
constexpr bool kRaceDetector = true;
#else
constexpr bool kRaceDetector = false;
#endif

// What a plan of another table, or no plan at all, may lead to: nothing outside the buffers (the sanitizers look), and
// rows that the table has are right.
void test_foreign_plan() {
  const int64_t slots = 150, R = 40, fewer = 25, d = 12;
  Buffer<int64_t> rows(slots);
  rows.integers(0, R - 1);
  for (int64_t i = 0; i < slots; i += 2) rows[i] = fewer;  // a run over several chunks that is left out
  Plan plan(slots);
  plan_on_cpu(RowKeys<int64_t>{rows.data, nullptr, nullptr, slots, 1, R, 0, false, bits_of(slots)}, plan);
  Buffer<float> values(slots * d), all(fewer * d), expected(R * d), table(fewer * d), state(fewer);
  Buffer<float> partials((slots + cuda::kRowSumChunk - 1) / cuda::kRowSumChunk * 2 * d);
  Buffer<int64_t> touched(R), step(1);
  step[0] = 1;
  values.normal(), table.normal();
  for (int64_t i = 0; i < R * d; ++i) expected[i] = 0;
  for (int64_t i = 0; i < fewer; ++i) state[i] = 1;
  RowSum<float> s{values.data, plan.view, nullptr, expected.data, nullptr, R, d};
  cpu::row_sum(s, 0, slots);
  s.sums = all.data, s.table_rows = fewer, s.partials = partials.data;
  RowUpdate<float> u{};
  u.table = table.data, u.second = state.data, u.grad = values.data, u.plan = plan.view, u.step = step.data;
  u.partials = partials.data, u.table_rows = fewer, u.dim = d, u.rule = RowRule::adagrad, u.second_per_row = true;
  const auto run_all = [&] {
    for (int64_t i = 0; i < fewer * d; ++i) all[i] = 0;
    check(cuda::row_sum(s, nullptr), "foreign plan");
    check(cuda::row_update(u, nullptr), "foreign plan");
  };
  run_all();
  for (int64_t i = 0; i < fewer * d; ++i)
    check(std::abs(all[i] - expected[i]) <= 1e-5f, "foreign plan: sum of a row that the table has");
  const int64_t count = plan.count[0];
  for (const int64_t wrong : {INT64_MIN, int64_t{-1}, int64_t{0}, count - 1, slots, INT64_MAX}) {
    plan.count[0] = wrong;
    run_all();
  }
  plan.count[0] = count;
  Buffer<float> sums(count * d);
  RowSum<float> compact = s;
  compact.rows = touched.data, compact.sums = sums.data, compact.table_rows = INT64_MAX;
  for (const int64_t wrong : {INT64_MIN, int64_t{0}, int64_t{7}, INT64_MAX}) {
    for (int64_t i = 0; i <= count; ++i) plan.runs[i] = wrong;
    run_all();
    // Two rows may then claim one place: a race, and anything may stand there afterwards.
    if (!kRaceDetector) check(cuda::row_sum(compact, nullptr), "foreign plan");
  }
}

// ---- Gate ----

template <typename H, typename K>
void test_gate(int64_t tokens, int64_t G, int64_t D, bool masked, bool residual, bool weights, int64_t shift = 0) {
  using A = accumulate_t<H>;
  const std::string what = "gate " + std::to_string(tokens) + "x" + std::to_string(G) + "x" + std::to_string(D);
  const int64_t n = tokens * G * D, parts = 3;
  Buffer<H> hidden(n, shift), grad_out(n, shift), out(n, shift), out_expected(n), grad_hidden(n, shift),
      grad_hidden_expected(n);
  Buffer<K> key(n, shift), value(tokens * D, shift), grad_key(n, shift), grad_key_expected(n),
      grad_value(tokens * D, shift), grad_value_expected(tokens * D);
  Buffer<A> weight(G * D, shift), w1(G * D), w2(G * D), stats(tokens * G * 3), stats_expected(tokens * G * 3);
  Buffer<A> partials(parts * G * D, shift), partials_expected(parts * G * D), product(G * D);
  Buffer<A> grad_w1(G * D), grad_w2(G * D), grad_w1_expected(G * D), grad_w2_expected(G * D);
  Buffer<bool> mask(tokens);
  hidden.normal(), key.normal(), value.normal(), grad_out.normal(), weight.normal(1), w1.normal(1), w2.normal(1);
  for (int64_t i = 0; i < tokens; ++i) mask[i] = uniform(0, 3) > 0;
  if (masked)
    for (int64_t i = 0; i < n; ++i)
      if (!mask[i / (G * D)] && !residual) hidden[i] = static_cast<H>(INFINITY);
  check(cuda::multiply(w1.data, w2.data, product.data, G * D, nullptr), what);
  for (int64_t i = 0; i < G * D; ++i) check(product[i] == w1[i] * w2[i], what + " product");

  const GateOptions<A> options{A(1e-6), A(1e-6), weights, weights, false, residual};
  GateForward<H, K> f{hidden.data,
                      key.data,
                      value.data,
                      weights ? weight.data : nullptr,
                      masked ? mask.data : nullptr,
                      out_expected.data,
                      stats_expected.data,
                      tokens,
                      G,
                      D,
                      options};
  cpu::gate_forward(f, 0, tokens);
  f.out = out.data;
  f.stats = stats.data;
  check(cuda::gate_forward(f, nullptr), what);
  compare(out, out_expected, what);
  compare(stats, stats_expected, what + " stats");

  GateBackward<H, K> b{grad_out.data,
                       hidden.data,
                       key.data,
                       value.data,
                       f.weight,
                       stats_expected.data,
                       f.mask,
                       grad_hidden_expected.data,
                       grad_key_expected.data,
                       grad_value_expected.data,
                       partials_expected.data,
                       tokens,
                       G,
                       D,
                       parts,
                       options};
  cpu::gate_backward(b, 0, parts);
  b.grad_hidden = grad_hidden.data, b.grad_key = grad_key.data, b.grad_value = grad_value.data,
  b.partials = partials.data;
  check(cuda::gate_backward(b, nullptr), what);
  compare(grad_hidden, grad_hidden_expected, what + " grad_hidden");
  compare(grad_key, grad_key_expected, what + " grad_key");
  compare(grad_value, grad_value_expected, what + " grad_value");
  compare(partials, partials_expected, what + " partials");
  GateWeights<A> w{partials_expected.data, w1.data, w2.data, grad_w1_expected.data,
                   grad_w2_expected.data,  parts,   G * D};
  cpu::gate_weights(w, 0, G * D);
  w.grad_hidden_weight = grad_w1.data, w.grad_key_weight = grad_w2.data;
  check(cuda::gate_weights(w, nullptr), what);
  compare(grad_w1, grad_w1_expected, what + " grad_hidden_weight");
  compare(grad_w2, grad_w2_expected, what + " grad_key_weight");
}

// ---- Short convolution ----

template <typename T>
void test_short_conv(int64_t B, int64_t tokens, int64_t G, int64_t D, int64_t K, int64_t dilation, bool norm,
                     bool documents, bool masked, bool residual = true, int64_t shift = 0) {
  using A = accumulate_t<T>;
  const std::string what = "short_conv " + std::to_string(tokens) + "x" + std::to_string(G) + "x" + std::to_string(D) +
                           " K " + std::to_string(K);
  const int64_t n = B * tokens * G * D, parts = 2;
  Buffer<T> x(n, shift), grad_out(n, shift), out(n, shift), out_expected(n), grad(n, shift), grad_expected(n);
  Buffer<A> weight(G * D * K), norm_weight(G * D), taps(K * G * D), taps_expected(K * G * D), rstd(B * tokens * G),
      rstd_expected(B * tokens * G);
  Buffer<A> partials(parts * K * G * D), partials_expected(parts * K * G * D);
  Buffer<A> grad_weight(G * D * K), grad_weight_expected(G * D * K), grad_norm(G * D), grad_norm_expected(G * D);
  Buffer<int64_t> document_ids(B * tokens);
  Buffer<bool> mask(B * tokens);
  x.normal(), grad_out.normal(), weight.normal(), norm_weight.normal(1);
  for (int64_t i = 0; i < B * tokens; ++i) {
    mask[i] = uniform(0, 3) > 0;
    document_ids[i] = i && uniform(0, 9) ? document_ids[i - 1] : uniform(0, 1);
  }
  ShortConvWeights<A> w{weight.data,
                        norm ? norm_weight.data : nullptr,
                        taps_expected.data,
                        partials_expected.data,
                        grad_weight_expected.data,
                        grad_norm_expected.data,
                        parts,
                        K,
                        G * D};
  cpu::short_conv_fold(w, 0, G * D);
  w.taps = taps.data;
  check(cuda::short_conv_fold(w, nullptr), what);
  compare(taps, taps_expected, what + " taps");

  const ShortConvShape shape{B,
                             tokens,
                             G,
                             D,
                             K,
                             dilation,
                             norm,
                             true,
                             residual,
                             documents ? document_ids.data : nullptr,
                             masked ? mask.data : nullptr};
  ShortConvForward<T> f{x.data, taps.data, out_expected.data, rstd_expected.data, A(1e-5), shape};
  cpu::short_conv_forward(f, 0, B * conv_blocks_per_row(shape));
  f.out = out.data, f.rstd = rstd.data;
  check(cuda::short_conv_forward(f, nullptr), what);
  compare(out, out_expected, what);
  compare(rstd, rstd_expected, what + " rstd");

  ShortConvBackward<T> b{grad_out.data,          x.data, taps.data, rstd_expected.data, grad_expected.data,
                         partials_expected.data, parts,  shape};
  cpu::short_conv_backward(b, 0, parts);
  b.grad_x = grad.data, b.partials = partials.data;
  check(cuda::short_conv_backward(b, nullptr), what);
  compare(grad, grad_expected, what + " grad_x");
  compare(partials, partials_expected, what + " partials");
  cpu::short_conv_unfold(w, 0, G * D);
  w.grad_weight = grad_weight.data, w.grad_norm_weight = grad_norm.data;
  check(cuda::short_conv_unfold(w, nullptr), what);
  compare(grad_weight, grad_weight_expected, what + " grad_weight");
  compare(grad_norm, grad_norm_expected, what + " grad_norm_weight");
}

// ---- Gate and short convolution in one ----

template <typename H, typename K>
void test_gate_conv(int64_t B, int64_t tokens, int64_t G, int64_t D, int64_t taps_count, int64_t dilation, bool norm,
                    bool documents, bool masked, bool residual, int64_t past = 0, int64_t shift = 0) {
  using A = accumulate_t<H>;
  const std::string what = "gate_conv " + std::to_string(tokens) + "x" + std::to_string(G) + "x" + std::to_string(D) +
                           " K " + std::to_string(taps_count) + " past " + std::to_string(past);
  const int64_t all = B * tokens, n = all * G * D, parts = 2, width = 3 * G + 1;
  Buffer<H> hidden(n), grad_out(n), out(n), out_expected(n), grad_hidden(n), grad_hidden_expected(n);
  Buffer<K> key(n), value(all * D), grad_key(n), grad_key_expected(n), grad_value(all * D),
      grad_value_expected(all * D);
  Buffer<A> weight(G * D), taps(taps_count * G * D), stats(all * width), stats_expected(all * width);
  Buffer<A> R(parts * G * D), R_expected(parts * G * D), S(parts * taps_count * G * D),
      S_expected(parts * taps_count * G * D);
  Buffer<K> past_value(B * past * D, shift);
  Buffer<A> past_stats(B * past * width);
  Buffer<int64_t> document_ids(B * past + all);
  Buffer<bool> mask(B * past + all);
  hidden.normal(), key.normal(), value.normal(), grad_out.normal(), weight.normal(1), taps.normal();
  for (int64_t i = 0; i < B * past + all; ++i) {
    mask[i] = uniform(0, 3) > 0;
    document_ids[i] = i && uniform(0, 9) ? document_ids[i - 1] : uniform(0, 1);
  }
  past_value.normal(), past_stats.normal();
  for (int64_t i = 0; i < B * past; ++i) {
    A& mean_square = past_stats[(i + 1) * width - 1];
    mean_square = std::abs(mean_square);
    if (!masked || mask[i + i / past * tokens]) continue;  // what is masked may hold anything
    for (int64_t d = 0; d < D; ++d) past_value[i * D + d] = static_cast<K>(std::numeric_limits<float>::quiet_NaN());
    for (int64_t j = 0; j < width; ++j) past_stats[i * width + j] = std::numeric_limits<A>::quiet_NaN();
  }
  const ShortConvShape shape{B,
                             tokens,
                             G,
                             D,
                             taps_count,
                             dilation,
                             norm,
                             true,
                             true,
                             documents ? document_ids.data : nullptr,
                             masked ? mask.data : nullptr,
                             past};
  const GateOptions<A> options{A(1e-6), A(1e-6), true, true, false, residual};
  GateConvForward<H, K> f{hidden.data,
                          key.data,
                          value.data,
                          weight.data,
                          taps.data,
                          out_expected.data,
                          stats_expected.data,
                          past ? past_value.data : nullptr,
                          past ? past_stats.data : nullptr,
                          A(1e-5),
                          options,
                          shape};
  cpu::gate_conv_stats(f, 0, all);
  cpu::gate_conv_forward(f, 0, B * conv_blocks_per_row(shape));
  f.out = out.data, f.stats = stats.data;
  check(cuda::gate_conv_forward(f, nullptr), what);
  compare(out, out_expected, what);
  compare(stats, stats_expected, what + " stats");

  Buffer<A> scratch(gate_conv_scratch(shape));
  GateConvBackward<H, K> b{grad_out.data,
                           hidden.data,
                           key.data,
                           value.data,
                           weight.data,
                           taps.data,
                           stats_expected.data,
                           f.past_value,
                           f.past_stats,
                           grad_hidden_expected.data,
                           grad_key_expected.data,
                           grad_value_expected.data,
                           R_expected.data,
                           S_expected.data,
                           nullptr,
                           parts,
                           A(1e-5),
                           options,
                           shape};
  cpu::gate_conv_backward(b, 0, parts);
  b.grad_hidden = grad_hidden.data, b.grad_key = grad_key.data, b.grad_value = grad_value.data;
  b.gate_partials = R.data, b.conv_partials = S.data, b.scratch = scratch.data;
  check(cuda::gate_conv_backward(b, nullptr), what);
  compare(grad_hidden, grad_hidden_expected, what + " grad_hidden");
  compare(grad_key, grad_key_expected, what + " grad_key");
  compare(grad_value, grad_value_expected, what + " grad_value");
  compare(R, R_expected, what + " R");
  compare(S, S_expected, what + " S");
}

// ---- Decoding ----

// A state, and whatever a step writes, of exactly its size.
template <typename K> struct DecodeState {
  using A = accumulate_t<K>;
  struct Marks {
    Buffer<int64_t> position, room, runs, documents;
    Buffer<bool> visible;
    int64_t slots, reach, max_rollback;
    Marks(int64_t B, int64_t reach, int64_t max_rollback)
        : position(B),
          room(B),
          runs(B * std::max<int64_t>(1, reach + max_rollback)),
          documents(runs.n),
          visible(runs.n),
          slots(runs.n / B),
          reach(reach),
          max_rollback(max_rollback) {
      room.integers(0, max_rollback), documents.integers(0, 1);
      for (int64_t b = 0; b < B; ++b) position[b] = b * 4;
      for (int64_t i = 0; i < runs.n; ++i) visible[i] = uniform(0, 4) > 0, runs[i] = 1;
    }
    RingMarks view() {
      return {position.data, room.data, visible.data, runs.data, documents.data, slots, reach, max_rollback};
    }
  };
  Marks history, conv;
  Buffer<int64_t> ids;
  Buffer<K> ring_value;
  Buffer<A> ring_stats;
  Buffer<int64_t> token_marks, conv_runs, begin, past_ids, rows;
  Buffer<bool> hashed, visible;
  Buffer<A> memory, past_stats, stats;
  Buffer<K> key, value, past_value;
  DecodeState(int64_t B, int64_t T, int64_t G, int64_t D, int64_t orders, int64_t C, int64_t E, int64_t P,
              int64_t max_rollback, int64_t shift)
      : history(B, orders - 1, max_rollback),
        conv(B, P, max_rollback),
        ids(history.runs.n),
        ring_value(conv.runs.n * D, shift),
        ring_stats(conv.runs.n * (3 * G + 1)),
        token_marks(4 * B * T),
        conv_runs(B * (P + T)),
        begin(B),
        past_ids(B * (orders - 1)),
        rows(B * T * C),
        hashed(B * T),
        visible(B * (P + T)),
        memory(B * T * E),
        past_stats(B * P * (3 * G + 1)),
        stats(B * T * (3 * G + 1)),
        key(B * T * G * D),
        value(B * T * D),
        past_value(B * P * D) {}
  DecodeMarks marks(int64_t n) {
    return {token_marks.data, token_marks.data + n, token_marks.data + 2 * n, past_ids.data,
            hashed.data,      conv_runs.data,       token_marks.data + 3 * n, visible.data,
            begin.data};
  }
};

struct DecodeCase {
  int64_t B, T, G, D, taps = 4, dilation = 3, orders = 3, heads = 2, d = 8, max_rollback = 0, shift = 0;
  bool documents = false, masked = false, ragged = false, ends = false, weights = true;
};

template <typename H, typename K> void test_decode(const DecodeCase& c) {
  using A = accumulate_t<H>;
  const auto [B, T, G, D, taps, dilation, orders, heads, d, max_rollback, shift, documents, masked, ragged, ends,
              weights] = c;
  const int64_t C = (orders - 1) * heads, E = C * d, P = (taps - 1) * dilation, V = 20, n = B * T, GD = G * D;
  const std::string what = "decode " + std::to_string(B) + "x" + std::to_string(T) + "x" + std::to_string(G) + "x" +
                           std::to_string(D) + " E " + std::to_string(E);
  Buffer<int64_t> token_ids(n), document_ids(n), lengths(B), multipliers(orders), moduli(C), offsets(C);
  Buffer<int32_t> token_map(V);
  Buffer<bool> mask(n);
  Buffer<K> table(C * 7 * d, shift), key_proj(GD * E, shift), value_proj(D * E), key_bias(GD), value_bias(D);
  Buffer<H> hidden(n * GD), out(n * GD), out_expected(n * GD);
  Buffer<K> hidden_weight(GD), key_weight(GD), norm_weight(GD), conv_weight(GD * taps);  // any float dtype
  Buffer<A> weight(GD), folded(GD * taps);
  token_map.integers(0, 9), multipliers.integers(INT64_MIN, INT64_MAX), lengths.integers(0, T);
  moduli.integers(1, 7);
  for (int64_t i = 0; i < C; ++i) offsets[i] = 7 * i;
  table.normal(), key_proj.normal(), value_proj.normal(), key_bias.normal(), value_bias.normal(), hidden.normal();
  hidden_weight.normal(1), key_weight.normal(1), norm_weight.normal(1), conv_weight.normal();
  for (int64_t i = 0; i < n; ++i) {
    mask[i] = uniform(0, 3) > 0;
    document_ids[i] = i && uniform(0, 4) ? document_ids[i - 1] : uniform(0, 1);
    const bool read = (!masked || mask[i]) && (!ragged || i % T < lengths[i / T]);
    token_ids[i] = read ? uniform(0, V - 1) : INT64_MIN;  // what is masked, or past the end, is never read
  }

  using State = DecodeState<K>;
  State on_cpu(B, T, G, D, orders, C, E, P, max_rollback, 0), on_cuda(B, T, G, D, orders, C, E, P, max_rollback, shift);
  on_cpu.ids.integers(0, V - 1), on_cpu.ring_value.normal(), on_cpu.ring_stats.normal();
  for (int64_t i = 3 * G; i < on_cpu.ring_stats.n; i += 3 * G + 1)
    on_cpu.ring_stats[i] = std::abs(on_cpu.ring_stats[i]);
  const auto each = [&](const auto& f) {  // what the state is
    for (auto ring : {&State::history, &State::conv}) {
      auto &one = on_cuda.*ring, &other = on_cpu.*ring;
      f(one.position, other.position), f(one.room, other.room), f(one.runs, other.runs);
      f(one.documents, other.documents), f(one.visible, other.visible);
    }
    f(on_cuda.ids, on_cpu.ids);
  };
  each([](auto& to, auto& from) { copy(to, from); });
  copy(on_cuda.ring_value, on_cpu.ring_value), copy(on_cuda.ring_stats, on_cpu.ring_stats);

  const auto arguments = [&](State& s, H* out) {
    const DecodeStep step{token_ids.data,
                          documents ? document_ids.data : nullptr,
                          masked ? mask.data : nullptr,
                          ragged ? lengths.data : nullptr,
                          s.history.view(),
                          s.conv.view(),
                          s.ids.data,
                          B,
                          T,
                          dilation,
                          2,
                          3,
                          ends,
                          true,
                          true};
    const DecodeMarks marks = s.marks(n);
    const NgramHash hash{marks.ids,
                         multipliers.data,
                         moduli.data,
                         offsets.data,
                         token_map.data,
                         marks.runs,
                         s.hashed.data,
                         marks.history,
                         s.rows.data,
                         &s == &on_cpu ? token_map[2] : 2,
                         B,
                         T,
                         1,
                         orders,
                         C,
                         V};
    const DecodeProducts<K> products{step,
                                     marks,
                                     hash,
                                     table.data,
                                     key_proj.data,
                                     key_bias.data,
                                     value_proj.data,
                                     value_bias.data,
                                     C * 7,
                                     d,
                                     E,
                                     G,
                                     D,
                                     s.ring_value.data,
                                     s.ring_stats.data,
                                     s.memory.data,
                                     s.key.data,
                                     s.value.data,
                                     s.past_value.data,
                                     s.past_stats.data};
    const ShortConvShape shape{B, T, G, D, taps, dilation, weights, true, true, marks.conv_runs, marks.visible, P};
    const GateConvForward<H, K> mix{hidden.data,
                                    s.key.data,
                                    s.value.data,
                                    weights ? weight.data : nullptr,
                                    folded.data,
                                    out,
                                    s.stats.data,
                                    s.past_value.data,
                                    s.past_stats.data,
                                    A(1e-5),
                                    {A(1e-6), A(1e-6), weights, weights, false, true},
                                    shape};
    const FloatType type = std::is_same_v<K, double>  ? FloatType::float64
                           : std::is_same_v<K, float> ? FloatType::float32
                           : std::is_same_v<K, Half>  ? FloatType::float16
                                                      : FloatType::bfloat16;
    const auto any = [&](const Buffer<K>& w) { return AnyFloat{weights ? w.data : nullptr, type}; };
    return Decode<H, K>{products,         any(hidden_weight),
                        any(key_weight),  AnyFloat{conv_weight.data, type},
                        any(norm_weight), mix.weight ? weight.data : nullptr,
                        folded.data,      mix};
  };
  const auto a = arguments(on_cpu, out_expected.data);
  cpu::decode_marks(a.step, a.marks, 0, B);
  check(cpu::ngram_hash(a.hash, 0, n) == kNoBadId, what + " ids");
  check(cpu::decode_memory<K>(a, 0, n) == kNoBadRow, what + " rows");
  cpu::decode_project<K>(a, 0, cpu::decode_groups(GD) + cpu::decode_groups(D));
  cpu::decode_weights(a, 0, GD);
  cpu::decode_past<K>(a, 0, B);
  cpu::gate_conv_stats(a.mix, 0, n);
  cpu::gate_conv_forward(a.mix, 0, B * conv_blocks_per_row(a.mix.shape));
  cpu::decode_append(a, 0, B);

  const auto b = arguments(on_cuda, out.data);
  int32_t bad_id = 0, bad_row = 0;
  check(cuda::decode_project<K>(b, &bad_id, &bad_row, nullptr), what);
  check(!bad_id && !bad_row, what + " reported");
  compare(on_cuda.key, on_cpu.key, what + " key", 2);
  compare(on_cuda.value, on_cpu.value, what + " value", 2);
  copy(on_cuda.key, on_cpu.key), copy(on_cuda.value, on_cpu.value);
  check(cuda::decode_mix(b, nullptr), what);
  compare(out, out_expected, what);
  each([&](auto& got, auto& expected) { check(same(got, expected, got.n), what + " state"); });
  check(same(on_cuda.ring_value, on_cpu.ring_value, on_cpu.ring_value.n), what + " ring value");
  compare(on_cuda.ring_stats, on_cpu.ring_stats, what + " ring stats");
}

void test_all() {
  test_hash(2, 150, 2, 3, 8, true, true, true, true);
  test_hash(3, 40, 2, 4, 3, false, true, false, true);
  test_hash(1, 7, 1, 2, 300, true, false, false, false);
  test_hash(2, 3, 2, 5, 2, true, false, true, true);

  test_embedding<float, int64_t>(40, 4, 37, 32, false, false, 0, 0);
  test_embedding<float, int32_t>(600, 4, 20, 12, true, true, 70, 0);    // a row over more than 32 chunks
  test_embedding<Half, int64_t>(1300, 1, 5, 260, false, false, 95, 0);  // and over more than a block has threads
  test_embedding<double, int64_t>(30, 2, 9, 5, false, true, 20, 0);
  test_embedding<BFloat16, int64_t>(50, 3, 30, 80, true, false, 30, 0);
  test_embedding<Half, int32_t>(60, 2, 11, 264, false, true, 50, 0);
  test_embedding<BFloat16, int64_t>(20, 3, 9, 16, false, false, 50, 1);  // misaligned
  test_embedding<Half, int64_t>(20, 3, 9, 7, false, false, 50, 0);

  test_quantized<true, BFloat16, int64_t>(40, 4, 37, 256, false, false, 0);
  test_quantized<true, float, int32_t>(60, 3, 20, 48, true, true, 0);
  test_quantized<true, Half, int64_t>(30, 2, 9, 75, false, true, 0);  // a short block, chunks that end early
  test_quantized<true, double, int64_t>(20, 2, 9, 33, true, true, 0);
  test_quantized<true, BFloat16, int32_t>(20, 3, 9, 64, false, false, 1);  // misaligned
  test_quantized<true, float, int64_t>(3, 2, 5, 4100, false, false, 0);    // a row for more than a block has threads
  test_quantized<true, BFloat16, int64_t>(600, 1, 40, 1, false, false, 0);
  test_quantized<false, BFloat16, int64_t>(40, 4, 37, 256, false, false, 0);
  test_quantized<false, float, int32_t>(60, 3, 20, 48, true, true, 0);
  test_quantized<false, Half, int64_t>(30, 2, 9, 75, false, true, 0);
  test_quantized<false, double, int64_t>(20, 2, 9, 33, true, true, 0);
  test_quantized<false, Half, int32_t>(20, 3, 9, 64, false, false, 1);

  test_row_plan<int64_t>(1, 1, 1, false, false, 0);
  test_row_plan<int32_t>(50, 4, 1000000, false, false, 0);
  test_row_plan<int64_t>(4096, 1, 300, false, false, 30);  // a whole chunk
  test_row_plan<int32_t>(4097, 2, 500, true, true, 10);
  test_row_plan<int32_t>(257 * kRunChunk + 1, 1, 400000, false, false, 10);  // more chunks than a block has threads
  test_row_plan<int64_t>(100, 3, int64_t{1} << 40, true, false, 50);
  test_row_plan<int64_t>(70, 1, 0, true, true, 0);  // nothing is touched

  test_rows<float, int64_t>(40, 4, 37, 32, false, false, 0, 0);
  test_rows<float, int32_t>(600, 4, 20, 12, true, true, 70, 0);    // a row over more than 32 chunks
  test_rows<Half, int64_t>(1300, 1, 5, 260, false, false, 95, 0);  // and over more columns than a block has threads
  test_rows<double, int64_t>(30, 2, 9, 5, false, true, 20, 0);
  test_rows<BFloat16, int64_t>(50, 3, 30, 80, true, false, 30, 0);
  test_rows<BFloat16, int32_t>(64, 1, 500, 32, false, false, 0, 0);  // no run crosses chunks, most are of one slot
  test_rows<Half, int32_t>(60, 2, 11, 264, false, true, 50, 0);      // more columns than a warp holds
  test_rows<BFloat16, int64_t>(20, 3, 9, 16, false, false, 50, 1);   // misaligned
  test_rows<BFloat16, int64_t>(40, 1, 9, 529, false, true, 30, 1);
  test_rows<Half, int64_t>(20, 3, 9, 7, false, false, 50, 0);
  test_rows<float, int64_t>(70, 1, 3, 257, false, false, 60, 0);
  test_rows<double, int32_t>(90, 1, 30, 66, true, false, 40, 0);
  test_rows<float, int64_t>(1200, 1, 2, 1, false, false, 97, 0);
  test_rows<float, int64_t>(33, 1, 33, 8, false, true, 0, 0);
  test_foreign_plan();

  test_gate<float, float>(7, 4, 64, true, true, true);
  test_gate<float, float>(5, 4, 264, false, false, true);
  test_gate<double, double>(5, 1, 34, true, false, true);
  test_gate<Half, Half>(6, 1, 48, false, true, false);
  test_gate<BFloat16, BFloat16>(9, 4, 128, true, true, true);
  test_gate<BFloat16, BFloat16>(4, 4, 2568, false, true, true);  // more columns a thread
  test_gate<BFloat16, BFloat16>(5, 3, 40, true, false, true);    // any number of branches
  test_gate<BFloat16, BFloat16>(5, 4, 64, true, true, true, 1);  // misaligned
  test_gate<float, BFloat16>(6, 4, 96, true, true, true);
  test_gate<float, Half>(6, 2, 33, true, false, true);
  test_gate<float, float>(3, 2, 2564, false, true, true);

  test_short_conv<float>(2, 70, 2, 64, 4, 3, true, true, true);
  test_short_conv<float>(1, 131, 1, 40, 4, 3, true, false, false);
  test_short_conv<float>(1, 20, 1, 132, 2, 20, false, true, true);
  test_short_conv<double>(2, 9, 3, 6, 3, 2, true, true, false, false);
  test_short_conv<double>(1, 12, 1, 8, 1, 1, true, false, true);
  test_short_conv<float>(2, 256, 1, 132, 4, 2, true, true, true);  // several warps, several blocks a part
  test_short_conv<BFloat16>(2, 140, 1, 48, 4, 2, true, true, true);
  test_short_conv<Half>(1, 30, 4, 24, 4, 3, true, false, true);
  test_short_conv<BFloat16>(1, 20, 2, 24, 4, 3, true, true, true, true, 1);  // misaligned
  test_short_conv<float>(1, 20, 2, 7, 5, 3, true, true, true);               // any number of taps
  test_short_conv<float>(2, 25, 1, 33, 3, 70, true, true, true, false);      // any dilation
  test_short_conv<BFloat16>(1, 9, 1, 2600, 4, 3, true, false, true);  // more columns than the backward has threads

  test_gate_conv<float, float>(2, 70, 4, 64, 4, 3, true, true, true, true);
  test_gate_conv<BFloat16, BFloat16>(1, 131, 1, 320, 4, 3, true, false, true, false);
  test_gate_conv<double, double>(1, 12, 4, 34, 2, 2, false, true, true, true);
  test_gate_conv<float, Half>(2, 9, 4, 136, 3, 2, true, true, true, true);
  test_gate_conv<Half, Half>(1, 9, 3, 33, 5, 2, true, true, true, true);      // any shape
  test_gate_conv<float, float>(2, 132, 1, 8, 4, 2, true, true, true, false);  // several blocks a part
  test_gate_conv<BFloat16, BFloat16>(1, 5, 1, 2568, 4, 3, true, false, true, true);
  test_gate_conv<float, float>(2, 70, 4, 64, 4, 3, true, true, true, true, 9);          // as far as taps reach
  test_gate_conv<BFloat16, BFloat16>(2, 3, 4, 72, 4, 3, true, true, true, true, 14);    // farther
  test_gate_conv<BFloat16, BFloat16>(2, 1, 1, 40, 4, 3, true, false, false, false, 4);  // less far
  test_gate_conv<double, double>(2, 131, 4, 34, 3, 5, false, true, true, false, 140);   // several blocks
  test_gate_conv<float, Half>(3, 7, 1, 136, 2, 20, true, true, false, true, 21);        // no token reaches another
  test_gate_conv<Half, Half>(2, 9, 4, 33, 4, 2, true, true, true, true, 7);             // odd width
  test_gate_conv<float, BFloat16>(2, 6, 4, 64, 4, 3, true, true, true, true, 9, 1);     // misaligned
  test_gate_conv<Half, Half>(2, 9, 3, 40, 5, 2, true, true, true, true, 6);             // any shape
  test_gate_conv<float, float>(2, 5, 2, 64, 4, 40, true, true, true, true, 100);

  test_decode<float, float>({.B = 1, .T = 1, .G = 4, .D = 64});
  test_decode<BFloat16, BFloat16>({.B = 3, .T = 1, .G = 1, .D = 40, .max_rollback = 2, .masked = true, .ends = true});
  test_decode<Half, Half>({.B = 2, .T = 6, .G = 2, .D = 24, .documents = true, .masked = true, .ragged = true});
  test_decode<double, double>({.B = 3,
                               .T = 13,
                               .G = 3,
                               .D = 7,
                               .taps = 3,
                               .dilation = 2,
                               .orders = 4,
                               .d = 3,
                               .documents = true,
                               .masked = true,
                               .ragged = true,
                               .ends = true});                                            // any shape
  test_decode<float, BFloat16>({.B = 2, .T = 2, .G = 4, .D = 72, .heads = 33, .d = 40});  // memory in two pieces
  test_decode<float, Half>({.B = 5, .T = 1, .G = 1, .D = 33, .taps = 1, .orders = 2, .weights = false});
  test_decode<float, float>({.B = 2, .T = 1, .G = 2, .D = 32, .heads = 600, .d = 4});  // rows for few tokens at a time
  test_decode<BFloat16, BFloat16>(
      {.B = 2, .T = 3, .G = 2, .D = 32, .d = 16, .shift = 1, .documents = true});  // misaligned
  test_decode<float, float>({.B = 1,
                             .T = 25,
                             .G = 1,
                             .D = 300,
                             .taps = 4,
                             .dilation = 2,
                             .max_rollback = 1,
                             .masked = true});  // more tokens than the ring holds, more columns than threads
}

}  // namespace

int main(int count, char** arguments) {
  const int runs = count > 1 ? std::atoi(arguments[1]) : 1;
  for (int run = 0; run < runs; ++run) {
    if (runs > 1) emulator::options() = {static_cast<emulator::Order>(3 - run % 4), static_cast<uint64_t>(run)};
    test_all();
  }
  const emulator::Statistics s = emulator::statistics();
  std::printf("%d failures, %llu blocks, %llu switches\n", failures, static_cast<unsigned long long>(s.blocks),
              static_cast<unsigned long long>(s.switches));
  return failures != 0;
}
