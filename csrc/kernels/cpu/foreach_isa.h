// Compiles the body of a kernel file once for every instruction set and picks one at run time.
//
// A kernel file reads
//     #ifndef ENGRAM_ISA
//     #define ENGRAM_BODY "kernels/cpu/<op>.cpp"
//     #include "kernels/cpu/foreach_isa.h"        // includes the file again per instruction set, body part below
//     ... entry points, which call ENGRAM_CALL(function, arguments) ...
//     #else
//     ... the body, in namespace engram::cpu::ENGRAM_ISA ...
//     #endif
// One file, no compiler flags per file: the target pragma applies to the body only. Everything the body may inline from
// elsewhere is included before the pragma, so no baseline code gets compiled for a newer processor.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>
#include "kernels/scalar.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "isa.h"

// Vectors of 64 bytes are passed between inlined functions only, so that their ABI differs with the target is harmless.
#pragma GCC diagnostic ignored "-Wpsabi"

#define ENGRAM_ISA baseline
#define ENGRAM_TARGET
#include ENGRAM_BODY
#undef ENGRAM_ISA
#undef ENGRAM_TARGET

#if defined(__x86_64__)

#define ENGRAM_ISA avx2
#define ENGRAM_TARGET __attribute__((target("avx2,fma,f16c,bmi2")))
#define ENGRAM_HAS_F16C
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#include ENGRAM_BODY
#pragma GCC pop_options
#undef ENGRAM_ISA
#undef ENGRAM_TARGET

#define ENGRAM_ISA avx512
#define ENGRAM_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")))
#define ENGRAM_HAS_AVX512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")
#include ENGRAM_BODY
#pragma GCC pop_options
#undef ENGRAM_ISA
#undef ENGRAM_TARGET
#undef ENGRAM_HAS_F16C
#undef ENGRAM_HAS_AVX512

#define ENGRAM_CALL(function, ...)                                                    \
  (::engram::cpu::isa() == ::engram::cpu::Isa::avx512 ? avx512::function(__VA_ARGS__) \
   : ::engram::cpu::isa() == ::engram::cpu::Isa::avx2 ? avx2::function(__VA_ARGS__)   \
                                                      : baseline::function(__VA_ARGS__))
#else
#define ENGRAM_CALL(function, ...) baseline::function(__VA_ARGS__)
#endif
