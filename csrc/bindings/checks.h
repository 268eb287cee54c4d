// Argument checks, dtype dispatch and small conversions shared by all op bindings. Every message says which op and
// argument, what was expected and what came; std::invalid_argument reaches Python as ValueError, std::out_of_range as
// IndexError (STD_TORCH_CHECK would be a RuntimeError with a source path in it).
#pragma once
#include <algorithm>
#include <array>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/scalar.h"

namespace engram {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ------------------------------------------------------------------------------------------------ messages

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e8m0fnu:
      return "float8_e8m0fnu";
    default:
      return "another dtype";
  }
}

template <typename Sizes> std::string list(const Sizes& sizes) {
  std::string text = "[";
  for (const auto size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

inline std::string describe(const Tensor& t) { return std::string(name_of(t.scalar_type())) + " " + list(t.sizes()); }

[[noreturn]] inline void fail(const std::string& op, const std::string& argument, const std::string& expected,
                              const std::string& came) {
  throw std::invalid_argument(op + ": " + argument + " must be " + expected + ", got " + came);
}

inline void require(bool ok, const char* op, const char* argument, const char* expected, const Tensor& t) {
  if (!ok) fail(op, argument, expected, describe(t));
}

// ------------------------------------------------------------------------------------------------ shapes and dtypes

using Sizes = std::vector<int64_t>;

inline Sizes sizes_of(const Tensor& t) { return Sizes(t.sizes().begin(), t.sizes().end()); }

inline Sizes leading(const Tensor& t, int64_t drop) {
  Sizes sizes = sizes_of(t);
  sizes.resize(sizes.size() - drop);
  return sizes;
}

inline int64_t product(const Sizes& sizes) {
  int64_t n = 1;
  for (const int64_t size : sizes) n *= size;
  return n;
}

// Sizes: a vector, or a list in braces, which costs no allocation.
template <typename Range = std::initializer_list<int64_t>>
void require_sizes(const char* op, const char* argument, const Tensor& t, const Range& sizes, const char* letters) {
  const auto own = t.sizes();
  if (!std::equal(own.begin(), own.end(), sizes.begin(), sizes.end()))
    fail(op, argument, std::string(letters) + " = " + list(sizes), list(own));
}

inline bool is_float(ScalarType t) {
  return t == ScalarType::Double || t == ScalarType::Float || t == ScalarType::Half || t == ScalarType::BFloat16;
}
inline bool is_integer(ScalarType t) {
  return t == ScalarType::Long || t == ScalarType::Int || t == ScalarType::Short || t == ScalarType::Char ||
         t == ScalarType::Byte;
}

inline void require_float(const char* op, const char* argument, const Tensor& t) {
  require(is_float(t.scalar_type()), op, argument, "float64, float32, bfloat16 or float16", t);
}
inline void require_index(const char* op, const char* argument, const Tensor& t) {
  require(t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int, op, argument, "int64 or int32", t);
}
inline void require_long(const char* op, const char* argument, const Tensor& t) {
  require(t.scalar_type() == ScalarType::Long, op, argument, "int64", t);
}

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "cpu" : t.is_cuda() ? "cuda:" + std::to_string(t.get_device_index()) : "another device";
}
inline void require_device(const char* op, const char* argument, const Tensor& t, const Tensor& like) {
  if (t.is_cpu() != like.is_cpu() || t.is_cuda() != like.is_cuda() || t.get_device_index() != like.get_device_index())
    fail(op, argument, "on " + device_of(like), "a tensor on " + device_of(t));
}

// ------------------------------------------------------------------------------------------------ conversions

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

inline Tensor cast(const Tensor& t, ScalarType dtype) {
  return as_contiguous(t.scalar_type() == dtype ? t : torch::stable::to(t, dtype));
}

inline Tensor empty(const Tensor& like, const Sizes& sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, sizes, dtype);
}
inline Tensor empty(const Tensor& like, const Sizes& sizes) { return empty(like, sizes, like.scalar_type()); }

inline ScalarType accumulate_dtype(const Tensor& t) {
  return t.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <typename T> const T* read(const OptionalTensor& t) { return t ? t->const_data_ptr<T>() : nullptr; }
template <typename T> T* write(const OptionalTensor& t) { return t ? t->mutable_data_ptr<T>() : nullptr; }

// mask: bool, of exactly the token shape.
inline OptionalTensor checked_mask(const char* op, const OptionalTensor& mask, const Sizes& tokens, const char* letters,
                                   const Tensor& like) {
  if (!mask) return mask;
  require_device(op, "mask", *mask, like);
  require(mask->scalar_type() == ScalarType::Bool, op, "mask", "bool", *mask);
  require_sizes(op, "mask", *mask, tokens, letters);
  return as_contiguous(*mask);
}

// An integer tensor of exactly the given shape, as int64.
inline OptionalTensor checked_ids(const char* op, const char* argument, const OptionalTensor& ids, const Sizes& sizes,
                                  const char* letters, const Tensor& like) {
  if (!ids) return ids;
  require_device(op, argument, *ids, like);
  require(is_integer(ids->scalar_type()), op, argument, "integer", *ids);
  require_sizes(op, argument, *ids, sizes, letters);
  return cast(*ids, ScalarType::Long);
}

// A weight of any float dtype, in the accumulation type.
inline OptionalTensor checked_weight(const char* op, const char* argument, const OptionalTensor& weight,
                                     const Sizes& sizes, const char* letters, const Tensor& like) {
  if (!weight) return weight;
  require_device(op, argument, *weight, like);
  require_float(op, argument, *weight);
  require_sizes(op, argument, *weight, sizes, letters);
  return cast(*weight, accumulate_dtype(like));
}

// ------------------------------------------------------------------------------------------------ dispatch

// f.operator()<T>() for the tensor's float dtype, which has been checked.
template <typename F> auto dispatch_float(const Tensor& t, F&& f) {
  switch (t.scalar_type()) {
    case ScalarType::Double:
      return f.template operator()<double>();
    case ScalarType::Float:
      return f.template operator()<float>();
    case ScalarType::Half:
      return f.template operator()<Half>();
    default:
      return f.template operator()<BFloat16>();
  }
}
template <typename F> auto dispatch_index(const Tensor& t, F&& f) {
  return t.scalar_type() == ScalarType::Int ? f.template operator()<int32_t>() : f.template operator()<int64_t>();
}

}  // namespace engram
