#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace engram::cpu {
namespace {

bool supported(Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::avx512:
      return supported(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::avx2:  // every processor with AVX2 and FMA has F16C
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
    case Isa::baseline:
      return true;
  }
#endif
  return isa == Isa::baseline;
}

Isa choose() {
  constexpr Isa all[] = {Isa::avx512, Isa::avx2, Isa::baseline};
  const char* wanted = std::getenv("ENGRAM_CPU_ISA");
  for (const Isa candidate : all) {
    if (wanted && *wanted ? std::string(wanted) == isa_name(candidate) : supported(candidate)) {
      if (supported(candidate)) return candidate;
      throw std::invalid_argument("ENGRAM_CPU_ISA=" + std::string(wanted) + ": this processor does not have it");
    }
  }
  throw std::invalid_argument("ENGRAM_CPU_ISA must be baseline, avx2 or avx512, got '" + std::string(wanted) + "'");
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::avx512:
      return "avx512";
    case Isa::avx2:
      return "avx2";
    default:
      return "baseline";
  }
}

}  // namespace engram::cpu
