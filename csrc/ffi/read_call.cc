// Reads frames, attributes and contexts of calls.
#include "ffi/read_call.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

namespace ep_runtime {

namespace ffi = xla::ffi;

namespace {

template <typename T>
Buffer ToBuffer(T& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), buffer.element_type(), Dims(dims.begin(), dims.end())};
}

// Attributes of all calls that read a dictionary of attributes. CheckNames refuses others, because
// they would be ignored silently.
constexpr std::string_view kAttributes[] = {
    "layer_id", "fingerprint", "handle",        "clear_slack", "rows",         "function",
    "gated",    "early",       "scaling",       "e5m2",        "power_of_two", "node_size",
    "rail",     "alignment",   "row_alignment", "crossing",    "added"};

Status CheckNames(const ffi::Dictionary& attrs) {
  for (std::string_view name : attrs) {
    if (std::find(std::begin(kAttributes), std::end(kAttributes), name) != std::end(kAttributes)) {
      continue;
    }
    return OtherVersion("call", "the program gives the attribute " + std::string(name) +
                                    ", which this library does not know");
  }
  return Status();
}

template <typename T>
Status ReadIfThere(const ffi::Dictionary& attrs, const char* name, T* out) {
  if (!attrs.contains(name)) return Status();
  const auto value = attrs.get<int64_t>(name);
  if (value.has_error()) {
    return InvalidArgument("attribute " + std::string(name) + " must be int64");
  }
  *out = static_cast<T>(*value);
  return Status();
}

}  // namespace

ffi::Error ToXla(const Status& status) {
  return ffi::Error(static_cast<ffi::ErrorCode>(status.code()), status.text());
}

Status ReadFrame(ffi::RemainingArgs& args, ffi::RemainingRets& rets, CallFrame* frame) {
  for (size_t i = 0; i < args.size(); ++i) {
    auto arg = args.get<ffi::AnyBuffer>(i);
    if (arg.has_error()) return Internal(arg.error().message());
    frame->args.push_back(ToBuffer(*arg));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto ret = rets.get<ffi::AnyBuffer>(i);
    if (ret.has_error()) return Internal(ret.error().message());
    frame->rets.push_back(ToBuffer(**ret));
  }
  return Status();
}

Status ReadAttributes(const ffi::Dictionary& attrs, Attributes* out) {
  EP_RETURN_IF_ERROR(CheckNames(attrs));
  const auto layer_id = attrs.get<int64_t>("layer_id");
  const auto fingerprint = attrs.get<int64_t>("fingerprint");
  const auto handle = attrs.get<int64_t>("handle");
  if (layer_id.has_error() || fingerprint.has_error() || handle.has_error()) {
    return InvalidArgument("attributes must hold layer_id, fingerprint and handle as int64");
  }
  out->layer_id = static_cast<uint64_t>(*layer_id);
  out->fingerprint = static_cast<uint64_t>(*fingerprint);
  out->handle = static_cast<uint32_t>(*handle);
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "clear_slack", &out->clear_slack));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "row_alignment", &out->row_alignment));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "rows", &out->rows));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "function", &out->function));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "gated", &out->gated));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "early", &out->early));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "scaling", &out->scaling));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "e5m2", &out->e5m2));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "power_of_two", &out->power_of_two));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "node_size", &out->node_size));
  EP_RETURN_IF_ERROR(ReadIfThere(attrs, "crossing", &out->crossing));
  return ReadIfThere(attrs, "added", &out->added);
}

Status ReadContext(const LayerEntry& layer, const Attributes& attributes, CallContext* out) {
  if (static_cast<int64_t>(attributes.handle) >= layer.in_flight) {
    return InvalidArgument("layer " + layer.name +
                           ": handle must be below in_flight=" + std::to_string(layer.in_flight) +
                           ", got " + std::to_string(attributes.handle))
        .With("argument", std::string("handle"));
  }
  out->layer = layer;
  out->handle = attributes.handle;
  out->row_alignment = attributes.row_alignment == 0 ? layer.alignment : attributes.row_alignment;
  if (out->row_alignment > 0 && layer.alignment % out->row_alignment == 0) return Status();
  return InvalidArgument("layer " + layer.name + ": row_alignment must divide alignment=" +
                         std::to_string(layer.alignment) + ", got " +
                         std::to_string(out->row_alignment));
}

Error OtherMesh(int device, const std::string& group) {
  return InvalidArgument("CUDA device " + std::to_string(device) + " drives no rank of group " +
                         group + "; the program runs on another mesh")
      .With("argument", std::string("mesh"));
}

}  // namespace ep_runtime
