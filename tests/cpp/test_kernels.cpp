// The CPU kernels without Python: every buffer is a heap block of exactly the stated size, so that the sanitizers see
// any access outside, and the results are held against the formulas of the headers, written here as plain scalar loops
// in double.
#include <cmath>
#include <cstdio>
#include <functional>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/cpu/isa.h"
#include "kernels/embedding.h"
#include "kernels/embedding_fp8.h"
#include "kernels/embedding_int8.h"
#include "kernels/gate_conv.h"
#include "kernels/ngram_hash.h"
#include "kernels/row_update.h"
#include "kernels/short_conv.h"

namespace {

using engram::accumulate_t;
using engram::BFloat16;
using engram::Half;

int passed = 0, failed = 0;
void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED %s\n", what.c_str());
}

std::mt19937_64 rng(0);
int64_t uniform(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
template <typename T> std::vector<T> normal(int64_t n) {
  std::vector<T> v(n);
  for (T& x : v) x = static_cast<T>(std::normal_distribution<double>()(rng));
  return v;
}
// A bool array of exact size; std::vector<bool> has no data().
struct Mask {
  std::vector<char> bytes;
  explicit Mask(int64_t n, double keep = 0.8) : bytes(n) {
    for (char& b : bytes) b = std::bernoulli_distribution(keep)(rng);
  }
  const bool* data() const { return reinterpret_cast<const bool*>(bytes.data()); }
};

template <typename T> double tolerance() { return 1e-11; }
template <> double tolerance<float>() { return 3e-5; }
template <> double tolerance<Half>() { return 3e-3; }
template <> double tolerance<BFloat16>() { return 2e-2; }

template <typename T> void close(const std::vector<T>& got, const std::vector<double>& want, const std::string& what) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += want[i] * want[i];
  }
  check(got.size() == want.size() && std::sqrt(error) <= tolerance<T>() * std::sqrt(norm) + 1e-300, what);
}

template <typename T> std::vector<double> to_double(const std::vector<T>& v) {
  std::vector<double> out(v.size());
  for (size_t i = 0; i < v.size(); ++i) out[i] = static_cast<double>(v[i]);
  return out;
}

// ------------------------------------------------------------------------------------------------ ngram_hash

void test_ngram_hash(int64_t B, int64_t T, int64_t L, int64_t N, int64_t H) {
  const int64_t C = (N - 1) * H, V = 50, pad = 2;
  std::vector<int64_t> ids(B * T), multipliers(L * N), moduli(L * C), offsets(L * C), documents(B * T),
      history(B * (N - 1));
  std::vector<int32_t> map(V);
  for (auto& x : ids) x = uniform(0, V - 1);
  for (auto& x : map) x = static_cast<int32_t>(uniform(0, 40));
  for (auto& x : multipliers) x = uniform(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
  for (auto& x : moduli)
    x = uniform(0, 3) ? uniform(1, int64_t{1} << uniform(0, 62)) : std::numeric_limits<int64_t>::max();
  for (auto& x : offsets) x = uniform(0, 1000);
  for (auto& x : documents) x = uniform(0, 9) / 9;
  for (auto& x : history) x = uniform(-1, V - 1);
  const Mask mask(B * T);
  std::vector<int64_t> rows(L * B * T * C, -1);
  const engram::NgramHash a{ids.data(),
                            multipliers.data(),
                            moduli.data(),
                            offsets.data(),
                            map.data(),
                            documents.data(),
                            mask.data(),
                            history.data(),
                            rows.data(),
                            map[pad],
                            B,
                            T,
                            L,
                            N,
                            C,
                            V};
  const int64_t cut = uniform(0, B * T);  // any split into ranges gives the same rows
  bool ok = engram::cpu::ngram_hash_bad_history(a) == engram::kNoBadId;
  ok &= engram::cpu::ngram_hash(a, cut, B * T) == engram::kNoBadId &&
        engram::cpu::ngram_hash(a, 0, cut) == engram::kNoBadId;
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      std::vector<int64_t> window(N, map[pad]);
      for (int64_t s = 0, p = t; s < N; ++s, --p) {
        if (p >= 0 ? !mask.data()[b * T + p] : history[b * (N - 1) + N - 1 + p] < 0) break;
        if (p < t && p + 1 > 0 && p >= 0 && documents[b * T + p] != documents[b * T + p + 1]) break;
        window[s] = map[p >= 0 ? ids[b * T + p] : history[b * (N - 1) + N - 1 + p]];
      }
      for (int64_t l = 0; l < L; ++l) {
        uint64_t mix = 0;
        for (int64_t n = 0; n < N; ++n) {
          mix ^= static_cast<uint64_t>(window[n]) * static_cast<uint64_t>(multipliers[l * N + n]);
          for (int64_t h = 0; n > 0 && h < H; ++h) {
            const int64_t c = (n - 1) * H + h, p = moduli[l * C + c];
            const __int128 r = static_cast<__int128>(static_cast<int64_t>(mix)) % p;
            ok &= rows[((l * B + b) * T + t) * C + c] == offsets[l * C + c] + static_cast<int64_t>(r < 0 ? r + p : r);
          }
        }
      }
    }
  }
  check(ok, "ngram_hash");
  if (B * T > 0) {
    std::vector<char> all(B * T, 1);
    engram::NgramHash bad = a;
    bad.mask = reinterpret_cast<const bool*>(all.data());
    ids[B * T - 1] = V;
    check(engram::cpu::ngram_hash(bad, 0, B * T) == B * T - 1, "ngram_hash reports an id outside the map");
  }
}

// ------------------------------------------------------------------------------------------------ embedding

template <typename T, typename Index> void test_embedding(int64_t tokens, int64_t C, int64_t R, int64_t d, bool shard) {
  const int64_t slots = tokens * C, begin = shard ? 3 : 0;
  const auto table = normal<T>(R * d);
  std::vector<Index> rows(slots);
  for (auto& r : rows) r = static_cast<Index>(shard ? uniform(0, R + 6) : uniform(0, R - 1));
  const Mask mask(tokens);
  std::vector<T> out(slots * d, T(7));
  const engram::EmbeddingForward<Index> forward{reinterpret_cast<const char*>(table.data()),
                                                rows.data(),
                                                mask.data(),
                                                reinterpret_cast<char*>(out.data()),
                                                slots,
                                                C,
                                                R,
                                                d * int64_t{sizeof(T)},
                                                begin,
                                                shard};
  const int64_t cut = uniform(0, slots);
  bool ok = engram::cpu::embedding_forward(forward, 0, cut) == engram::kNoBadRow;
  ok &= engram::cpu::embedding_forward(forward, cut, slots) == engram::kNoBadRow;
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t row = int64_t{rows[slot]} - begin;
    const bool used = mask.data()[slot / C] && row >= 0 && row < R;
    for (int64_t i = 0; i < d; ++i)
      ok &= static_cast<double>(out[slot * d + i]) == (used ? static_cast<double>(table[row * d + i]) : 0.0);
  }
  check(ok, "embedding forward");
}

// ------------------------------------------------------------------------------------------------ quantised rows

double e4m3_by_definition(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return byte & 128 ? -magnitude : magnitude;
}

// Every byte under random scales, in rows that end within a vector and within a block.
template <typename T, typename Index> void test_quantized(int64_t tokens, int64_t C, int64_t R, int64_t d, bool shard) {
  const int64_t slots = tokens * C, begin = shard ? 3 : 0, blocks = (d + 31) / 32;
  std::vector<uint8_t> values(R * d), bytes(R * blocks);
  for (auto& v : values) v = static_cast<uint8_t>(uniform(0, 255));
  for (auto& b : bytes) b = static_cast<uint8_t>(uniform(100, 140));
  const auto scales = normal<float>(R);
  std::vector<Index> rows(slots);
  for (auto& r : rows) r = static_cast<Index>(shard ? uniform(0, R + 6) : uniform(0, R - 1));
  const Mask mask(tokens);
  std::vector<T> out(slots * d, T(7)), rounded(slots * d, T(7));
  const engram::EmbeddingFp8<T, Index> fp8{
      values.data(), bytes.data(), rows.data(), mask.data(), out.data(), slots, C, R, d, blocks, begin, shard};
  const engram::EmbeddingInt8<T, Index> int8{reinterpret_cast<const int8_t*>(values.data()),
                                             scales.data(),
                                             rows.data(),
                                             mask.data(),
                                             rounded.data(),
                                             slots,
                                             C,
                                             R,
                                             d,
                                             begin,
                                             shard};
  const int64_t cut = uniform(0, slots);
  bool ok = engram::cpu::embedding_fp8(fp8, 0, cut) == engram::kNoBadRow &&
            engram::cpu::embedding_fp8(fp8, cut, slots) == engram::kNoBadRow &&
            engram::cpu::embedding_int8(int8, cut, slots) == engram::kNoBadRow &&
            engram::cpu::embedding_int8(int8, 0, cut) == engram::kNoBadRow;
  std::vector<double> products(slots * d);
  for (int64_t i = 0; i < slots * d; ++i) {
    const int64_t row = static_cast<int64_t>(rows[i / d]) - begin, j = i % d;
    const bool inside = mask.data()[i / d / C] && row >= 0 && row < R;
    const double factor = inside ? std::ldexp(1.0, bytes[row * blocks + j / 32] - 127) : 0;
    const double exact = inside ? e4m3_by_definition(values[row * d + j]) * factor : 0;
    const double expected = static_cast<double>(static_cast<T>(static_cast<float>(exact)));
    ok &= exact != exact ? out[i] != out[i] : static_cast<double>(out[i]) == expected;
    products[i] = inside ? static_cast<int8_t>(values[row * d + j]) * double{scales[row]} : 0;
  }
  check(ok, "embedding_fp8");
  close(rounded, products, "embedding_int8");
  if (!shard && slots > 0) {
    const std::vector<char> all(tokens, 1);
    rows[slots - 1] = static_cast<Index>(R);
    auto bad = fp8;
    bad.mask = reinterpret_cast<const bool*>(all.data());
    auto bad8 = int8;
    bad8.mask = bad.mask;
    check(engram::cpu::embedding_fp8(bad, 0, slots) == slots - 1 &&
              engram::cpu::embedding_int8(bad8, 0, slots) == slots - 1,
          "quantised lookups report a row outside");
  }
}

// ------------------------------------------------------------------------------------------------ row_plan

void sort_keys(std::vector<int64_t>& keys, int bits, int slot_bits) {
  const int64_t chunks = uniform(1, 5);
  engram::cpu::SortKeys sort{keys.data(), nullptr, nullptr,   static_cast<int64_t>(keys.size()),
                             chunks,      bits,    slot_bits, static_cast<int>(uniform(0, 7))};
  std::vector<int64_t> scratch(keys.size()), starts(chunks * sort.buckets());
  sort.scratch = scratch.data();
  sort.starts = starts.data();
  if (sort.bucket_bits > 0) {
    for (int64_t i = 0; i < chunks; ++i) engram::cpu::sort_count(sort, i);
    engram::cpu::sort_offsets(sort);
    for (int64_t i = 0; i < chunks; ++i) engram::cpu::sort_scatter(sort, i);
  }
  for (int64_t i = 0; i < sort.buckets(); ++i) engram::cpu::sort_bucket(sort, i);
}

struct Plan {
  std::vector<int64_t> keys, runs, count;
  engram::RowPlan view() const {
    const int64_t slots = static_cast<int64_t>(keys.size());
    return {keys.data(), runs.data(), count.data(), slots, engram::bits_of(slots)};
  }
};

template <typename Index>
Plan make_plan(const std::vector<Index>& rows, const Mask& mask, int64_t C, int64_t R, int64_t begin, bool shard) {
  const int64_t slots = static_cast<int64_t>(rows.size()), cut = uniform(0, slots), chunks = engram::run_chunks(slots);
  const int slot_bits = engram::bits_of(slots);
  Plan plan{std::vector<int64_t>(slots), std::vector<int64_t>(slots + 1), std::vector<int64_t>(1)};
  const engram::RowKeys<Index> keys{rows.data(), mask.data(), plan.keys.data(), slots, C, R, begin, shard, slot_bits};
  check(engram::cpu::row_keys(keys, cut, slots) == engram::kNoBadRow &&
            engram::cpu::row_keys(keys, 0, cut) == engram::kNoBadRow,
        "row_plan: rows inside");
  sort_keys(plan.keys, engram::bits_of(R) + slot_bits, slot_bits);
  std::vector<int64_t> scratch(chunks);
  const engram::RowRuns runs{plan.keys.data(), plan.runs.data(), plan.count.data(), scratch.data(), slots, R,
                             slot_bits};
  for (int64_t i = chunks; i-- > 0;) engram::cpu::runs_count(runs, i);
  engram::cpu::runs_offsets(runs);
  for (int64_t i = chunks; i-- > 0;) engram::cpu::runs_write(runs, i);
  return plan;
}

// The slots of each row, in order: what a plan says, found by looking at every slot.
template <typename Index>
std::vector<std::vector<int64_t>> slots_by_row(const std::vector<Index>& rows, const Mask& mask, int64_t C, int64_t R,
                                               int64_t begin) {
  std::vector<std::vector<int64_t>> slots(R);
  for (size_t slot = 0; slot < rows.size(); ++slot) {
    const int64_t row = int64_t{rows[slot]} - begin;
    if (mask.data()[slot / C] && row >= 0 && row < R) slots[row].push_back(static_cast<int64_t>(slot));
  }
  return slots;
}

void check_plan(const Plan& plan, const std::vector<std::vector<int64_t>>& slots) {
  const engram::RowPlan view = plan.view();
  int64_t run = 0, position = 0;
  bool ok = true;
  for (size_t row = 0; row < slots.size(); ++row) {
    if (slots[row].empty()) continue;
    ok &= run < *view.count && view.runs[run++] == position;
    for (const int64_t slot : slots[row]) {
      ok &= view.row(position) == static_cast<int64_t>(row) && view.slot(position) == slot;
      ++position;
    }
  }
  check(ok && run == *view.count && view.runs[run] == position, "row_plan");
}

// ------------------------------------------------------------------------------------------------ row_sum

template <typename T> void test_row_sum(const Plan& plan, const std::vector<std::vector<int64_t>>& slots, int64_t d) {
  const int64_t all = static_cast<int64_t>(plan.keys.size()), cut = uniform(0, all), count = plan.count[0];
  const auto values = normal<T>(all * d);
  std::vector<double> want_all(slots.size() * d), want;
  std::vector<int64_t> want_rows;
  for (size_t row = 0; row < slots.size(); ++row) {
    for (const int64_t slot : slots[row])
      for (int64_t i = 0; i < d; ++i) want_all[row * d + i] += static_cast<double>(values[slot * d + i]);
    if (slots[row].empty()) continue;
    want_rows.push_back(static_cast<int64_t>(row));
    want.insert(want.end(), want_all.begin() + row * d, want_all.begin() + (row + 1) * d);
  }
  std::vector<int64_t> rows(count, -1);
  std::vector<T> sums(count * d, T(7)), scattered(slots.size() * d, T(0));
  engram::RowSum<T> a{values.data(), plan.view(), rows.data(), sums.data(), nullptr, INT64_MAX, d};
  engram::cpu::row_sum(a, cut, all);
  engram::cpu::row_sum(a, 0, cut);
  check(rows == want_rows, "row_sum rows");
  close(sums, want, "row_sum");
  a.rows = nullptr, a.sums = scattered.data();
  engram::cpu::row_sum(a, cut, all);
  engram::cpu::row_sum(a, 0, cut);
  close(scattered, want_all, "row_sum, scattered");
}

// ------------------------------------------------------------------------------------------------ row_update

using engram::RowRule;
struct Rule {
  RowRule rule;
  bool first, second, per_row;
};
const Rule kRules[] = {{RowRule::sgd, false, false, false},   {RowRule::sgd, true, false, false},
                       {RowRule::adagrad, false, true, true}, {RowRule::adam, true, true, false},
                       {RowRule::adam, true, true, true},     {RowRule::adam, false, true, false},
                       {RowRule::adam, false, true, true}};

// One step of each rule, along the plan or on every row, against the formulas in double.
template <typename T>
void test_row_update(const Plan* plan, const std::vector<std::vector<int64_t>>& slots, int64_t d) {
  using A = accumulate_t<T>;
  const int64_t R = static_cast<int64_t>(slots.size()), all = plan ? static_cast<int64_t>(plan->keys.size()) : R;
  const int64_t cut = uniform(0, all), step = uniform(1, 9);
  const auto grad = normal<T>(all * d);
  for (const Rule& rule : kRules) {
    const bool adam = rule.rule == RowRule::adam;
    auto table = normal<T>(R * d);
    auto first = normal<A>(rule.first ? R * d : 0), second = normal<A>(rule.second ? rule.per_row ? R : R * d : 0);
    for (A& v : second) v = std::abs(v);
    auto w = to_double(table), m = to_double(first), v = to_double(second);
    engram::RowUpdate<T> a{};
    a.table = table.data(), a.grad = grad.data(), a.step = &step, a.table_rows = R, a.dim = d, a.rule = rule.rule;
    a.first = rule.first ? first.data() : nullptr, a.second = rule.second ? second.data() : nullptr;
    a.second_per_row = rule.per_row, a.maximize = uniform(0, 1);
    a.lr = 0.25, a.beta1 = 0.7, a.beta2 = 0.9, a.eps = 1e-3, a.weight_decay = 0.1;
    if (plan) a.plan = plan->view();
    engram::cpu::row_update(a, cut, all);
    engram::cpu::row_update(a, 0, cut);

    for (int64_t row = 0; row < R; ++row) {
      if (plan && slots[row].empty()) continue;
      std::vector<double> g(d);
      for (const int64_t slot : plan ? slots[row] : std::vector<int64_t>{row})
        for (int64_t i = 0; i < d; ++i) g[i] += (a.maximize ? -1 : 1) * static_cast<double>(grad[slot * d + i]);
      double mean = 0;
      for (int64_t i = 0; i < d; ++i) mean += g[i] * g[i] / static_cast<double>(d);
      if (rule.per_row) v[row] = adam ? a.beta2 * v[row] + (1 - a.beta2) * mean : v[row] + mean;
      for (int64_t i = 0; i < d; ++i) {
        const int64_t at = row * d + i;
        double change = g[i];
        if (rule.first) change = m[at] = a.beta1 * m[at] + (adam ? 1 - a.beta1 : 1) * g[i];
        if (rule.first && adam) change /= 1 - std::pow(a.beta1, step);
        if (rule.second && !rule.per_row) v[at] = a.beta2 * v[at] + (1 - a.beta2) * g[i] * g[i];
        if (rule.second) {
          const double state = v[rule.per_row ? row : at];
          change /= std::sqrt(adam ? state / (1 - std::pow(a.beta2, step)) : state) + a.eps;
        }
        w[at] = w[at] * (1 - a.lr * a.weight_decay) - a.lr * change;
      }
    }
    close(table, w, "row_update table");
    close(first, m, "row_update first");
    close(second, v, "row_update second");
  }
}

// Stochastic rounding: one of the two neighbours, by the bits of the header, and the exact value in the mean.
void test_stochastic_rounding(int64_t R, int64_t d) {
  std::vector<BFloat16> table(R * d, BFloat16(1.0f)), grad(R * d, BFloat16(1.0f));
  const int64_t step = 3;
  engram::RowUpdate<BFloat16> a{};
  a.table = table.data(), a.grad = grad.data(), a.step = &step, a.table_rows = R, a.dim = d;
  a.rule = RowRule::sgd, a.maximize = true, a.stochastic = true, a.lr = 1.0 / 512, a.seed = 11;
  engram::cpu::row_update(a, 0, R);
  const float up = 1.0f + 1.0f / 128;  // the neighbour; a quarter of the way there
  double mean = 0;
  bool ok = true;
  for (int64_t i = 0; i < R * d; ++i) {
    const uint64_t key = engram::rounding_key(a.seed, step, i / d);
    const uint32_t bits = engram::rounding_bits(key, static_cast<uint32_t>(i % d));
    ok &= bits < 0x10000 && static_cast<float>(table[i]) == (bits + 0x4000 >= 0x10000 ? up : 1.0f);
    mean += (static_cast<float>(table[i]) - 1.0) / static_cast<double>(R * d);
  }
  const double exact = 1.0 / 512, deviation = std::sqrt(3.0 / 16 / static_cast<double>(R * d)) / 128;
  check(ok, "row_update rounds by the bits of the header");
  check(std::abs(mean - exact) < 4 * deviation, "row_update keeps the exact value in the mean");
}

template <typename T, typename Index> void test_rows(int64_t tokens, int64_t C, int64_t R, int64_t d, bool shard) {
  const int64_t begin = shard ? 3 : 0;
  std::vector<Index> rows(tokens * C);
  for (auto& r : rows) r = static_cast<Index>(shard ? uniform(0, R + 6) : uniform(0, R - 1));
  for (auto& r : rows) r = uniform(0, 2) ? r : static_cast<Index>(begin + R / 2);
  const Mask mask(tokens);
  const Plan plan = make_plan(rows, mask, C, R, begin, shard);
  const auto slots = slots_by_row(rows, mask, C, R, begin);
  check_plan(plan, slots);
  test_row_sum<T>(plan, slots, d);
  test_row_update<T>(&plan, slots, d);
  test_row_update<T>(nullptr, slots, d);
}

// ------------------------------------------------------------------------------------------------ gate

// The gradient of f with respect to x in double, by central differences: independent of the analytic formulas under
// test.
std::vector<double> numeric(std::vector<double>& x, const std::function<double()>& f) {
  std::vector<double> grad(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double h = 1e-5, keep = x[i];
    x[i] = keep + h;
    const double up = f();
    x[i] = keep - h;
    grad[i] = (up - f()) / (2 * h);
    x[i] = keep;
  }
  return grad;
}

template <typename H, typename K> void test_gate(int64_t n, int64_t G, int64_t D, bool residual, bool gradients) {
  using A = accumulate_t<H>;
  const auto hidden = normal<H>(n * G * D), grad_out = normal<H>(n * G * D);
  const auto key = normal<K>(n * G * D), value = normal<K>(n * D);
  const auto weight = normal<A>(G * D);
  const Mask mask(n);
  const engram::GateOptions<A> options{A(1e-6), A(1e-6), true, true, false, residual};
  std::vector<H> out(n * G * D, H(7));
  std::vector<A> stats(n * G * 3, A(7));
  const engram::GateForward<H, K> forward{
      hidden.data(), key.data(), value.data(), weight.data(), mask.data(), out.data(), stats.data(), n, G, D, options};
  const int64_t cut = uniform(0, n);
  engram::cpu::gate_forward(forward, cut, n);
  engram::cpu::gate_forward(forward, 0, cut);

  auto h = to_double(hidden), k = to_double(key), v = to_double(value), w = to_double(weight);
  const auto oracle = [&] {
    std::vector<double> y(n * G * D);
    for (int64_t i = 0; i < n * G; ++i) {
      double hh = 0, kk = 0, hk = 0;
      for (int64_t d = 0; d < D; ++d) {
        hh += h[i * D + d] * h[i * D + d];
        kk += k[i * D + d] * k[i * D + d];
        hk += h[i * D + d] * k[i * D + d] * w[i % G * D + d];
      }
      const double s = hk / std::sqrt((hh / D + 1e-6) * (kk / D + 1e-6) * D);
      const double u = std::copysign(std::sqrt(std::max(std::abs(s), 1e-6)), s);
      for (int64_t d = 0; d < D; ++d) {
        const bool on = mask.data()[i / G];
        y[i * D + d] = (on ? v[i / G * D + d] / (1 + std::exp(-u)) : 0) + (residual ? h[i * D + d] : 0);
      }
    }
    return y;
  };
  close(out, oracle(), "gate forward");

  const int64_t parts = 3;
  std::vector<H> grad_hidden(n * G * D, H(7));
  std::vector<K> grad_key(n * G * D, K(7)), grad_value(n * D, K(7));
  std::vector<A> partials(parts * G * D, A(7)), grad_hidden_weight(G * D), grad_key_weight(G * D);
  const std::vector<A> ones(G * D, A(1));
  const engram::GateBackward<H, K> backward{grad_out.data(),
                                            hidden.data(),
                                            key.data(),
                                            value.data(),
                                            weight.data(),
                                            stats.data(),
                                            mask.data(),
                                            grad_hidden.data(),
                                            grad_key.data(),
                                            grad_value.data(),
                                            partials.data(),
                                            n,
                                            G,
                                            D,
                                            parts,
                                            options};
  for (int64_t p = parts; p-- > 0;) engram::cpu::gate_backward(backward, p, p + 1);
  engram::cpu::gate_weights(engram::GateWeights<A>{partials.data(), weight.data(), ones.data(),
                                                   grad_hidden_weight.data(), grad_key_weight.data(), parts, G * D},
                            0, G * D);
  if (!gradients) return;
  const auto loss = [&] {
    const auto y = oracle();
    double total = 0;
    for (size_t i = 0; i < y.size(); ++i) total += y[i] * static_cast<double>(grad_out[i]);
    return total;
  };
  const auto near = [](const auto& got, const std::vector<double>& want, const char* what) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error += std::pow(static_cast<double>(got[i]) - want[i], 2);
      norm += want[i] * want[i];
    }
    check(std::sqrt(error) <= 1e-5 * std::sqrt(norm) + 1e-9, what);
  };
  near(grad_hidden, numeric(h, loss), "gate grad_hidden");
  near(grad_key, numeric(k, loss), "gate grad_key");
  near(grad_value, numeric(v, loss), "gate grad_value");
  near(grad_hidden_weight, numeric(w, loss), "gate grad_hidden_weight");
}

// ------------------------------------------------------------------------------------------------ short_conv

template <typename T>
void test_short_conv(int64_t B, int64_t N, int64_t G, int64_t D, int64_t K, int64_t dilation, bool norm,
                     bool gradients) {
  using A = accumulate_t<T>;
  const auto x = normal<T>(B * N * G * D), grad_out = normal<T>(B * N * G * D);
  const auto weight = normal<A>(G * D * K), norm_weight = normal<A>(G * D);
  std::vector<int64_t> documents(B * N);
  for (int64_t i = 1; i < B * N; ++i) documents[i] = documents[i - 1] + (uniform(0, 9) == 0);
  const Mask mask(B * N);
  const engram::ShortConvShape shape{B, N, G, D, K, dilation, norm, true, true, documents.data(), mask.data()};
  std::vector<A> taps(K * G * D);
  engram::ShortConvWeights<A> weights{
      weight.data(), norm ? norm_weight.data() : nullptr, taps.data(), nullptr, nullptr, nullptr, 0, K, G * D};
  engram::cpu::short_conv_fold(weights, 0, G * D);
  std::vector<T> out(B * N * G * D, T(7));
  std::vector<A> rstd(B * N * G, A(7));
  const engram::ShortConvForward<T> forward{x.data(), taps.data(), out.data(), rstd.data(), A(1e-5), shape};
  const int64_t blocks = B * engram::conv_blocks_per_row(shape);
  for (int64_t b = blocks; b-- > 0;) engram::cpu::short_conv_forward(forward, b, b + 1);

  auto xd = to_double(x), wd = to_double(weight), nd = norm ? to_double(norm_weight) : std::vector<double>(G * D, 1.0);
  const auto oracle = [&] {
    std::vector<double> y = xd;
    const auto r = [&](int64_t at) {
      double total = 0;
      for (int64_t d = 0; d < D; ++d) total += xd[at * D + d] * xd[at * D + d];
      return norm ? 1 / std::sqrt(total / D + 1e-5) : 1.0;
    };
    for (int64_t b = 0; b < B; ++b) {
      for (int64_t t = 0; t < N; ++t) {
        if (!mask.data()[b * N + t]) continue;
        for (int64_t g = 0; g < G; ++g) {
          std::vector<double> z(D);
          for (int64_t j = 0; j < K; ++j) {
            const int64_t from = t - (K - 1 - j) * dilation;
            if (from < 0 || !mask.data()[b * N + from] || documents[b * N + from] != documents[b * N + t]) continue;
            const int64_t at = (b * N + from) * G + g;
            const double scale = r(at);
            for (int64_t d = 0; d < D; ++d) z[d] += wd[(g * D + d) * K + j] * nd[g * D + d] * xd[at * D + d] * scale;
          }
          for (int64_t d = 0; d < D; ++d) y[((b * N + t) * G + g) * D + d] += z[d] / (1 + std::exp(-z[d]));
        }
      }
    }
    return y;
  };
  close(out, oracle(), "short_conv forward");

  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(blocks, 3));
  std::vector<T> grad_x(B * N * G * D, T(7));
  std::vector<A> partials(parts * K * G * D, A(7)), grad_weight(G * D * K), grad_norm_weight(G * D);
  const engram::ShortConvBackward<T> backward{grad_out.data(), x.data(),        taps.data(), rstd.data(),
                                              grad_x.data(),   partials.data(), parts,       shape};
  for (int64_t p = parts; p-- > 0;) engram::cpu::short_conv_backward(backward, p, p + 1);
  weights = {weight.data(),
             norm ? norm_weight.data() : nullptr,
             nullptr,
             partials.data(),
             grad_weight.data(),
             norm ? grad_norm_weight.data() : nullptr,
             parts,
             K,
             G * D};
  engram::cpu::short_conv_unfold(weights, 0, G * D);
  if (!gradients) return;
  const auto loss = [&] {
    const auto y = oracle();
    double total = 0;
    for (size_t i = 0; i < y.size(); ++i) total += y[i] * static_cast<double>(grad_out[i]);
    return total;
  };
  const auto near = [](const auto& got, const std::vector<double>& want, const char* what) {
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error += std::pow(static_cast<double>(got[i]) - want[i], 2);
      size += want[i] * want[i];
    }
    check(std::sqrt(error) <= 1e-6 * std::sqrt(size) + 1e-9, what);
  };
  near(grad_x, numeric(xd, loss), "short_conv grad_x");
  near(grad_weight, numeric(wd, loss), "short_conv grad_weight");
  if (norm) near(grad_norm_weight, numeric(nd, loss), "short_conv grad_norm_weight");
}

// ------------------------------------------------------------------------------------------------ gate_conv

// Of x [B, N, width] the tokens from .. to of every row.
template <typename T>
std::vector<T> tokens_of(const T* x, int64_t B, int64_t N, int64_t width, int64_t from, int64_t to) {
  std::vector<T> part;
  for (int64_t b = 0; b < B; ++b) part.insert(part.end(), x + (b * N + from) * width, x + (b * N + to) * width);
  return part;
}

// The tokens after a cut, given value and stats of those before it: bit for bit what the whole says of them.
template <typename H, typename K>
void test_gate_conv_past(engram::GateConvForward<H, K> f, engram::GateConvBackward<H, K> g) {
  using A = accumulate_t<H>;
  engram::ShortConvShape& s = f.shape;
  const int64_t B = s.batch, N = s.tokens, D = s.dim, GD = s.branches * D, width = 3 * s.branches + 1;
  const int64_t cut = uniform(0, N), past = uniform(std::min(cut, (s.taps - 1) * s.dilation), cut), first = cut - past;
  const auto later = [&](const auto* x, int64_t pitch) { return tokens_of(x, B, N, pitch, cut, N); };
  const auto hidden = later(f.hidden, GD), grad_out = later(g.grad_out, GD);
  const auto key = later(f.key, GD), value = later(f.value, D);
  const auto past_value = tokens_of(f.value, B, N, D, first, cut);
  const auto past_stats = tokens_of(g.stats, B, N, width, first, cut);
  const auto documents = tokens_of(s.document_ids, B, N, 1, first, N);
  const auto visible = tokens_of(reinterpret_cast<const char*>(s.mask), B, N, 1, first, N);
  const auto want_out = later(f.out, GD), want_grad_hidden = later(g.grad_hidden, GD);
  const auto want_grad_key = later(g.grad_key, GD), want_grad_value = later(g.grad_value, D);
  const auto want_stats = later(g.stats, width);
  std::vector<H> out(hidden.size(), H(7)), grad_hidden(hidden.size(), H(7));
  std::vector<K> grad_key(key.size(), K(7)), grad_value(value.size(), K(7));
  std::vector<A> stats(want_stats.size(), A(7)), R(GD), S(s.taps * GD);
  s.tokens = N - cut, s.past = past, s.document_ids = documents.data();
  s.mask = reinterpret_cast<const bool*>(visible.data());
  f.hidden = hidden.data(), f.key = key.data(), f.value = value.data(), f.out = out.data(), f.stats = stats.data();
  f.past_value = past_value.data(), f.past_stats = past_stats.data();
  engram::cpu::gate_conv_stats(f, 0, B * s.tokens);
  engram::cpu::gate_conv_forward(f, 0, B * engram::conv_blocks_per_row(s));
  g.grad_out = grad_out.data(), g.hidden = f.hidden, g.key = f.key, g.value = f.value, g.stats = f.stats;
  g.past_value = f.past_value, g.past_stats = f.past_stats, g.grad_hidden = grad_hidden.data();
  g.grad_key = grad_key.data(), g.grad_value = grad_value.data(), g.gate_partials = R.data();
  g.conv_partials = S.data(), g.parts = 1, g.shape = s;
  engram::cpu::gate_conv_backward(g, 0, 1);
  check(out == want_out && stats == want_stats, "gate_conv forward with a past");
  check(grad_hidden == want_grad_hidden && grad_key == want_grad_key && grad_value == want_grad_value,
        "gate_conv backward with a past");
}

// Against gate and then short_conv in double, which the tests above hold against the formulas: forward and backward.
template <typename H, typename K>
void test_gate_conv(int64_t B, int64_t N, int64_t G, int64_t D, int64_t taps_count, int64_t dilation, bool norm,
                    bool residual) {
  using A = accumulate_t<H>;
  const int64_t n = B * N, GD = G * D;
  const auto hidden = normal<H>(n * GD), grad_out = normal<H>(n * GD);
  const auto key = normal<K>(n * GD), value = normal<K>(n * D);
  const auto weight = normal<A>(GD), taps = normal<A>(taps_count * GD);
  std::vector<int64_t> documents(n);
  for (int64_t i = 1; i < n; ++i) documents[i] = documents[i - 1] + (uniform(0, 9) == 0);
  const Mask mask(n);
  const engram::ShortConvShape shape{B, N, G, D, taps_count, dilation, norm, true, true, documents.data(), mask.data()};
  const engram::GateOptions<A> options{A(1e-2), A(1e-6), true, true, false, residual};
  std::vector<H> out(n * GD, H(7)), grad_hidden(n * GD, H(7));
  std::vector<A> stats(n * (3 * G + 1), A(7));
  const engram::GateConvForward<H, K> forward{hidden.data(), key.data(), value.data(), weight.data(),
                                              taps.data(),   out.data(), stats.data(), nullptr,
                                              nullptr,       A(1e-5),    options,      shape};
  const int64_t cut = uniform(0, n), blocks = B * engram::conv_blocks_per_row(shape),
                parts = std::max<int64_t>(1, std::min<int64_t>(blocks, 3));
  engram::cpu::gate_conv_stats(forward, cut, n);
  engram::cpu::gate_conv_stats(forward, 0, cut);
  for (int64_t b = blocks; b-- > 0;) engram::cpu::gate_conv_forward(forward, b, b + 1);
  std::vector<K> grad_key(n * GD, K(7)), grad_value(n * D, K(7));
  std::vector<A> gate_partials(parts * GD, A(7)), conv_partials(parts * taps_count * GD, A(7));
  const engram::GateConvBackward<H, K> backward{grad_out.data(),
                                                hidden.data(),
                                                key.data(),
                                                value.data(),
                                                weight.data(),
                                                taps.data(),
                                                stats.data(),
                                                nullptr,
                                                nullptr,
                                                grad_hidden.data(),
                                                grad_key.data(),
                                                grad_value.data(),
                                                gate_partials.data(),
                                                conv_partials.data(),
                                                nullptr,
                                                parts,
                                                A(1e-5),
                                                options,
                                                shape};
  for (int64_t p = parts; p-- > 0;) engram::cpu::gate_conv_backward(backward, p, p + 1);
  test_gate_conv_past(forward, backward);

  const auto h = to_double(hidden), k = to_double(key), v = to_double(value), w = to_double(weight),
             t = to_double(taps);
  const auto dy = to_double(grad_out);
  std::vector<double> gated(n * GD), gate_stats(n * G * 3), y(n * GD), rstd(n * G), dx(n * GD), S(taps_count * GD);
  const engram::GateOptions<double> plain{double(A(1e-2)), double(A(1e-6)), true, true, false, false};
  engram::cpu::gate_forward(engram::GateForward<double, double>{h.data(), k.data(), v.data(), w.data(), mask.data(),
                                                                gated.data(), gate_stats.data(), n, G, D, plain},
                            0, n);
  engram::cpu::short_conv_forward(
      engram::ShortConvForward<double>{gated.data(), t.data(), y.data(), rstd.data(), double(A(1e-5)), shape}, 0,
      blocks);
  engram::cpu::short_conv_backward(
      engram::ShortConvBackward<double>{dy.data(), gated.data(), t.data(), rstd.data(), dx.data(), S.data(), 1, shape},
      0, 1);
  for (int64_t i = 0; i < n * GD; ++i) {
    y[i] = mask.data()[i / GD] ? y[i] + (residual ? h[i] : 0) : residual ? h[i] : 0;
    dx[i] =
        mask.data()[i / GD] ? dx[i] : 0;  // short_conv passes its residual through masked positions, the gate stops it
  }
  std::vector<double> dh(n * GD), dk(n * GD), dv(n * D), R(GD);
  engram::cpu::gate_backward(
      engram::GateBackward<double, double>{dx.data(), h.data(), k.data(), v.data(), w.data(), gate_stats.data(),
                                           mask.data(), dh.data(), dk.data(), dv.data(), R.data(), n, G, D, 1, plain},
      0, 1);
  for (int64_t i = 0; residual && i < n * GD; ++i) dh[i] += dy[i];
  close(out, y, "gate_conv forward");
  // The gate's slope magnifies the rounding of the score, so gradients through it are held to float's own limit only
  // loosely.
  const auto near = [](const auto& got, const std::vector<double>& want, double bound, const char* what) {
    double error = 0, size = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      error += std::pow(static_cast<double>(got[i]) - want[i], 2);
      size += want[i] * want[i];
    }
    check(std::sqrt(error) <= bound * std::sqrt(size) + 1e-300, what);
  };
  const double loose = std::is_same_v<A, double> ? 1e-9 : 10 * tolerance<H>() + 1e-2;
  near(grad_hidden, dh, loose, "gate_conv grad_hidden");
  near(grad_key, dk, loose, "gate_conv grad_key");
  near(grad_value, dv, loose, "gate_conv grad_value");
  std::vector<double> R_sum(GD), S_sum(taps_count * GD);
  for (int64_t p = 0; p < parts; ++p) {
    for (int64_t i = 0; i < GD; ++i) R_sum[i] += gate_partials[p * GD + i];
    for (int64_t i = 0; i < taps_count * GD; ++i) S_sum[i] += conv_partials[p * taps_count * GD + i];
  }
  near(R_sum, R, loose, "gate_conv gate partials");
  near(S_sum, S, loose, "gate_conv conv partials");
}

template <typename T> void test_floats() {
  for (const int64_t d : {1, 7, 16, 33, 130}) {
    for (const bool shard : {false, true}) {
      test_embedding<T, int64_t>(uniform(1, 40), 3, 20, d, shard);
      test_embedding<T, int32_t>(uniform(1, 40), 2, 5, d, shard);
      test_quantized<T, int64_t>(uniform(1, 40), 3, 20, d, shard);
      test_quantized<T, int32_t>(uniform(1, 40), 2, 5, d, shard);
      test_rows<T, int64_t>(uniform(1, 40), 3, 20, d, shard);
      test_rows<T, int32_t>(uniform(1, 40), 2, 5, d, shard);
    }
    test_gate<T, T>(uniform(1, 20), uniform(1, 5), d, d % 2, false);
    test_short_conv<T>(2, uniform(1, 300), 2, d, 4, 3, d % 2, false);
    test_short_conv<T>(1, uniform(1, 20), 1, d, uniform(1, 5), uniform(1, 30), true, false);
    test_gate_conv<T, T>(2, uniform(1, 300), 2, d, 4, 3, d % 2, d % 2 == 0);
    test_gate_conv<T, T>(1, uniform(1, 20), uniform(1, 3), d, uniform(1, 5), uniform(1, 30), true, true);
  }
  test_rows<T, int64_t>(700, 8, 50, 5, false);   // past the smallest radix bucket
  test_rows<T, int32_t>(3000, 3, 900, 2, true);  // several chunks of runs
  test_gate<T, T>(0, 2, 8, true, false);
  test_short_conv<T>(2, 0, 2, 8, 4, 3, true, false);
  test_short_conv<T>(0, 5, 2, 8, 4, 3, true, false);
  test_gate_conv<T, T>(2, 0, 2, 8, 4, 3, true, false);
}

}  // namespace

int main() {
  try {
    std::printf("instruction set: %s\n", engram::cpu::isa_name(engram::cpu::isa()));
  } catch (const std::invalid_argument& error) {
    std::printf("skipped: %s\n", error.what());
    return 77;
  }
  for (int i = 0; i < 40; ++i)
    test_ngram_hash(uniform(1, 3), uniform(1, 20), uniform(1, 3), uniform(2, 5), uniform(1, 9));
  test_ngram_hash(2, 0, 1, 3, 8);
  test_stochastic_rounding(100, 130);
  test_floats<double>();
  test_floats<float>();
  test_floats<Half>();
  test_floats<BFloat16>();
  test_gate<float, Half>(9, 3, 40, true, false);
  test_gate<float, BFloat16>(9, 3, 40, false, false);
  test_gate_conv<float, Half>(2, 140, 3, 40, 4, 3, true, true);
  test_gate_conv<float, BFloat16>(2, 140, 3, 40, 4, 3, true, false);
  for (int i = 0; i < 3; ++i) {
    test_gate<double, double>(4, 2, uniform(1, 9), i % 2, true);
    test_short_conv<double>(2, uniform(1, 12), 2, uniform(1, 5), uniform(1, 4), uniform(1, 3), i % 2, true);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
