// The instruction set in use: the best the processor has, or what ENGRAM_CPU_ISA names (baseline, avx2, avx512).
#pragma once

namespace engram::cpu {

enum class Isa { baseline, avx2, avx512 };

Isa isa();  // chosen once; throws std::invalid_argument when ENGRAM_CPU_ISA cannot be had
const char* isa_name(Isa);

}  // namespace engram::cpu
