// The walk over the slots of a lookup, shared by the kernels that look rows up. Included once per instruction set by
// the kernel bodies, after vec.h (no include guard; see foreach_isa.h).

namespace engram::cpu::ENGRAM_ISA {

// Far enough ahead for a row to arrive from memory, near enough to stay in the first-level cache until it is used.
constexpr int64_t kPrefetchSlots = 16;

ENGRAM_INLINE void prefetch(const void* from, int64_t bytes) {
  for (int64_t b = 0; b < std::min<int64_t>(bytes, 512); b += 64)
    __builtin_prefetch(static_cast<const char*>(from) + b);
}

// For the slots [begin, end): read(slot, row), or skip(slot) where no row is to be read; ahead(row) some slots before.
// Returns the first slot whose row is outside the table (and is no other shard's), or kNoBadRow.
template <typename Args, typename Ahead, typename Read, typename Skip>
ENGRAM_INLINE int64_t for_each_slot(const Args& a, int64_t begin, int64_t end, Ahead&& ahead, Read&& read,
                                    Skip&& skip) {
  int64_t bad = kNoBadRow;
  for (int64_t slot = begin; slot < end; ++slot) {
    if (slot + kPrefetchSlots < end) {
      const int64_t row = local_row(a, slot + kPrefetchSlots);
      if (row >= 0 && row < a.table_rows) ahead(row);
    }
    const int64_t row = local_row(a, slot);
    if (row >= 0 && row < a.table_rows) {
      read(slot, row);
    } else {
      skip(slot);
      if (row < 0 && bad == kNoBadRow) bad = slot;
    }
  }
  return bad;
}

// 16 neighbouring bytes of a row as lanes of 32 bits; what a tail does not have is zero.
ENGRAM_INLINE u32 load_bytes(Full, const uint8_t* p) {
#if defined(ENGRAM_HAS_AVX512)
  return reinterpret_cast<u32>(
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(ENGRAM_HAS_F16C)
  u32 v;
  for (int i = 0; i < 2; ++i) {
    const __m256i half = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
    std::memcpy(reinterpret_cast<char*>(&v) + 32 * i, &half, sizeof half);
  }
  return v;
#else
  typedef uint8_t u8 __attribute__((vector_size(16)));
  u8 bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, u16), u32);  // at once it would be byte by byte
#endif
}
ENGRAM_INLINE u32 load_bytes(Tail tail, const uint8_t* p) {
  uint8_t bytes[16] = {};
  std::memcpy(bytes, p, tail.n);
  return load_bytes(Full{}, bytes);
}

}  // namespace engram::cpu::ENGRAM_ISA
