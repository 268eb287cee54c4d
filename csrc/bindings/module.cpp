// engram._C: importing it runs the registrations of the other files; its own functions are host-only facts.
#include <pybind11/pybind11.h>

#include <cstring>
#include <string>

#include "kernels/cpu/isa.h"

#define ENGRAM_STRING_(...) #__VA_ARGS__  // variadic: a list of architectures has commas
#define ENGRAM_STRING(...) ENGRAM_STRING_(__VA_ARGS__)

// Whether this CPU multiplies matrices of a half type natively. Without its instructions a library's half products are
// several times slower than float32 ones. Other architectures than x86-64 are left to torch.
bool half_products([[maybe_unused]] const char* dtype) {
#if defined(__x86_64__)
  return std::strcmp(dtype, "bfloat16") == 0 ? __builtin_cpu_supports("avx512bf16")
                                             : __builtin_cpu_supports("avx512fp16");
#else
  return true;
#endif
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("half_products", [](const std::string& dtype) { return half_products(dtype.c_str()); });
  m.def("build_info", [] {
    pybind11::dict info;
    info["torch"] = ENGRAM_STRING(ENGRAM_BUILT_WITH_TORCH);
#if defined(__clang__)
    info["compiler"] = "clang " __clang_version__;
#else
    info["compiler"] = "gcc " __VERSION__;
#endif
    info["cpu"] = engram::cpu::isa_name(engram::cpu::isa());
#ifdef ENGRAM_WITH_CUDA
    info["cuda"] = ENGRAM_STRING(ENGRAM_CUDA_ARCHS);
#else
    info["cuda"] = pybind11::none();
#endif
    return info;
  });
}
