// The machine's limits as plain loops; limits.py compiles this file when the benchmark starts and calls it by ctypes.
#include <cstdint>
#include <cstring>

extern "C" {

// Sum of `count` 64-bit words: reads each once.
uint64_t read_words(const uint64_t* words, int64_t count, int threads) {
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}

// to[i] = table[rows[i]]: the lookup as the plainest loop.
void gather_rows(char* to, const char* table, const int64_t* rows, int64_t count, int64_t row_bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * row_bytes, table + rows[i] * row_bytes, row_bytes);
}
}
