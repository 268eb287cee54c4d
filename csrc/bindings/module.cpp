// engram._C: importing it runs the registrations of the other files; its own functions are host-only facts.
#include <pybind11/pybind11.h>

#include "kernels/cpu/isa.h"

#define ENGRAM_STRING_(...) #__VA_ARGS__  // variadic: a list of architectures has commas
#define ENGRAM_STRING(...) ENGRAM_STRING_(__VA_ARGS__)

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
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
