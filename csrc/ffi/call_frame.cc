// Checks operands of a call, and builds the errors.
#include "ffi/call_frame.h"

#include <algorithm>
#include <cstring>
#include <sstream>

namespace ep_runtime {
namespace {

namespace ffi = xla::ffi;

std::string TextOf(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

}  // namespace

std::string TextOf(ffi::DataType type) {
  std::ostringstream text;
  text << type;
  return text.str();
}

int64_t Buffer::bytes() const {
  auto bytes = static_cast<int64_t>(ffi::ByteWidth(dtype));
  for (int64_t dim : dims) bytes *= dim;
  return bytes;
}

Error Refused(const char* call, const char* argument, const std::string& text) {
  return InvalidArgument(std::string(call) + ": " + text).With("argument", std::string(argument));
}

Error OtherVersion(const char* call, const std::string& text) {
  return VersionSkew(std::string(call) + ": " + text +
                     "; they are of different versions of ep-runtime: build the native library "
                     "again, and programs that were stored")
      .With("call", std::string(call));
}

Error Operand::MustBe(const std::string& want) const {
  return Refused(call_, name_, std::string(name_) + " must be " + want);
}

Status Operand::CheckShape(const Dims& want) const {
  if (dims() == want) return Status();
  return MustBe("of shape " + TextOf(want) + ", got " + TextOf(dims()));
}

Status Operand::CheckType(ffi::DataType want) const {
  if (type() == want) return Status();
  return MustBe(TextOf(want) + ", got " + TextOf(type()));
}

Status Operand::Check(ffi::DataType type, const Dims& want) const {
  EP_RETURN_IF_ERROR(CheckType(type));
  return CheckShape(want);
}

bool Operand::absent(size_t num_dims) const {
  const auto zero = [](int64_t dim) { return dim == 0; };
  return dims().size() == num_dims && std::all_of(dims().begin(), dims().end(), zero);
}

Status CallFrame::CheckCount(size_t num_args, size_t num_rets) const {
  if (args.size() == num_args && rets.size() == num_rets) return Status();
  return OtherVersion(call, "the program gives " + std::to_string(args.size()) + " operands and " +
                                std::to_string(rets.size()) + " results, this library takes " +
                                std::to_string(num_args) + " and " + std::to_string(num_rets));
}

uint8_t LostByte(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
    case ffi::DataType::S8:
    case ffi::DataType::S16:
    case ffi::DataType::S32:
    case ffi::DataType::S64:
    case ffi::DataType::U8:
    case ffi::DataType::U16:
    case ffi::DataType::U32:
    case ffi::DataType::U64:
      return 0;
    default:
      return 0xFF;  // all ones are a NaN in every float type
  }
}

void FillLost(const CallFrame& frame) {
  for (const Buffer& ret : frame.rets) {
    std::memset(ret.data, LostByte(ret.dtype), static_cast<size_t>(ret.bytes()));
  }
}

}  // namespace ep_runtime
