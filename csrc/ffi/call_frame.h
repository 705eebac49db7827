// Operand and CallFrame: operands and results of a call.
#ifndef EP_RUNTIME_FFI_CALL_FRAME_H_
#define EP_RUNTIME_FFI_CALL_FRAME_H_

#include <array>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "core/base/status.h"
#include "core/memory/board.h"
#include "xla/ffi/api/ffi.h"

namespace ep_runtime {

using Dims = std::vector<int64_t>;

// One operand or result. Its memory lives until the call's future completes.
struct Buffer {
  void* data;
  xla::ffi::DataType dtype;
  Dims dims;

  int64_t bytes() const;
};

// Returns the XLA type of arrays of `T`. 8-bit floats are passed as uint8.
template <typename T>
constexpr xla::ffi::DataType TypeOf() {
  if (std::is_same_v<T, float>) return xla::ffi::DataType::F32;
  if (std::is_same_v<T, int32_t>) return xla::ffi::DataType::S32;
  if (std::is_same_v<T, uint32_t>) return xla::ffi::DataType::U32;
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || std::is_same_v<T, uint8_t>));
  return xla::ffi::DataType::U8;
}

// Converts a float type to any enum of row or element types. Returns false for other types.
template <typename Enum>
bool ToFloatType(xla::ffi::DataType type, Enum* out) {
  switch (type) {
    case xla::ffi::DataType::F32:
      *out = Enum::kF32;
      return true;
    case xla::ffi::DataType::BF16:
      *out = Enum::kBF16;
      return true;
    case xla::ffi::DataType::F16:
      *out = Enum::kF16;
      return true;
    default:
      return false;
  }
}

std::string TextOf(xla::ffi::DataType type);

// Returns an error with the text "<call>: <text>", about `argument`.
Error Refused(const char* call, const char* argument, const std::string& text);

// Returns the error of a program from a Python package whose calls do not match this library.
Error OtherVersion(const char* call, const std::string& text);

// A buffer with the names of its call and of the operand or result. Errors contain both names, and
// the expected and the actual value.
class Operand {
 public:
  Operand(const char* call, const char* name, const Buffer& buffer)
      : call_(call), name_(name), buffer_(&buffer) {}

  const char* name() const { return name_; }
  void* data() const { return buffer_->data; }
  xla::ffi::DataType type() const { return buffer_->dtype; }
  const Dims& dims() const { return buffer_->dims; }
  int64_t dim(size_t index) const { return index < dims().size() ? dims()[index] : -1; }
  int64_t element_bytes() const { return static_cast<int64_t>(xla::ffi::ByteWidth(type())); }

  Status CheckShape(const Dims& want) const;
  Status CheckType(xla::ffi::DataType want) const;
  Status Check(xla::ffi::DataType type, const Dims& want) const;
  // Checks the buffer, then returns its memory.
  template <typename T>
  Status Read(const Dims& want, T** out) const {
    return Read(TypeOf<std::remove_const_t<T>>(), want, out);
  }
  template <typename T>
  Status Read(xla::ffi::DataType type, const Dims& want, T** out) const {
    EP_RETURN_IF_ERROR(Check(type, want));
    *out = static_cast<T*>(data());
    return Status();
  }
  // Whether the operand has `num_dims` dims that are all 0, which means that it is not given.
  bool absent(size_t num_dims) const;
  template <typename T>
  Status ReadIfGiven(const Dims& want, T** out) const {
    return absent(want.size()) ? Status() : Read(want, out);
  }
  // Reads the operand if `wanted`, and otherwise checks that it is absent.
  template <typename T>
  Status ReadIf(bool wanted, const Dims& want, T** out) const {
    if (wanted) return Read(want, out);
    return Check(TypeOf<std::remove_const_t<T>>(), Dims(want.size(), 0));
  }
  // Reads the operand's type, which must be f32, bf16 or f16.
  template <typename Enum>
  Status ReadFloatType(Enum* out) const {
    return ToFloatType(type(), out) ? Status() : MustBe("float32, bfloat16 or float16");
  }
  // Returns the error "<call>: <name> must be <want>".
  Error MustBe(const std::string& want) const;

 private:
  const char* call_;
  const char* name_;
  const Buffer* buffer_;
};

// Operands and results that XLA gave to one call. XLA's own frame is invalid once the handler
// returns.
struct CallFrame {
  const char* call;           // name of the call in errors
  OpCode op = OpCode::kNone;  // op, if the call belongs to a group
  std::vector<Buffer> args;
  std::vector<Buffer> rets;

  // Returns the first operands or results, in the order of `names`, after checking how many there
  // are.
  template <typename... Names>
  std::array<Operand, sizeof...(Names)> Args(Names... names) const {
    return Named(args, 0, names...);
  }
  template <typename... Names>
  std::array<Operand, sizeof...(Names)> Rets(Names... names) const {
    return Named(rets, 0, names...);
  }
  template <typename... Names>
  std::array<Operand, sizeof...(Names)> Named(const std::vector<Buffer>& buffers, size_t first,
                                              Names... names) const {
    return {{Operand(call, names, buffers[first++])...}};
  }

  Status CheckCount(size_t num_args, size_t num_rets) const;
};

// Returns the byte that fills results of a failed call: it makes floats NaN and integers 0.
uint8_t LostByte(xla::ffi::DataType type);
void FillLost(const CallFrame& frame);

}  // namespace ep_runtime

#endif  // EP_RUNTIME_FFI_CALL_FRAME_H_
