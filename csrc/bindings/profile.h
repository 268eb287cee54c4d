// A named range around every op on CUDA, for nsys and ncu: domain "engram", the op's name. NVTX is header-only and
// costs some nanoseconds where no profiler is attached; without its headers, or without CUDA kernels, there are no ranges.
#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>

#if (defined(ENGRAM_WITH_CUDA) || defined(ENGRAM_EMULATED)) && __has_include(<nvtx3/nvtx3.hpp>)
#include <nvtx3/nvtx3.hpp>
#define ENGRAM_NVTX
#endif

namespace engram {

#ifdef ENGRAM_NVTX
struct ProfilerDomain {
  static constexpr const char* name{"engram"};
};
using Range = nvtx3::scoped_range_in<ProfilerDomain>;
#else
struct Range {
  explicit Range(const char*) {}
};
#endif

template <std::size_t N> struct Name {
  char text[N];
  constexpr Name(const char (&characters)[N]) { std::copy_n(characters, N, text); }
};

// traced<"op", &op>: the same function inside a range.
template <Name name, auto function> struct Traced;
template <Name name, typename R, typename... Args, R (*function)(Args...)> struct Traced<name, function> {
  static R call(Args... args) {
    [[maybe_unused]] const Range range(name.text);
    return function(std::move(args)...);
  }
};
template <Name name, auto function> constexpr auto traced = &Traced<name, function>::call;

}  // namespace engram
