// Status, and Error that builds one.
#ifndef EP_RUNTIME_CORE_BASE_STATUS_H_
#define EP_RUNTIME_CORE_BASE_STATUS_H_

#include <cstdint>
#include <string>
#include <utility>

namespace ep_runtime {

// Error codes, numbered as in gRPC and XLA, so that a status passes through the FFI unchanged.
enum class Code : int {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
  kInternal = 13,
  kUnauthenticated = 16,
};

// Success, or an error. `ep_runtime/errors.py` turns the error's text into an exception of the
// right class.
class Status {
 public:
  Status() = default;
  Status(Code code, std::string text) : code_(code), text_(std::move(text)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  Code code_ = Code::kOk;
  std::string text_;
};

// Builds one error: `Error(Code::kAborted, "PeerLostError").Says("...").With("rank", 3)`. The
// error's text is the line "EP_RUNTIME/<class>: <message> {json fields}".
class Error {
 public:
  Error(Code code, const char* class_name) : code_(code), class_name_(class_name) {}

  Error& Says(std::string message);
  // Puts `where` in front of the message.
  Error& In(const std::string& where);
  Error& With(const char* field, int64_t value);
  Error& With(const char* field, double value);
  Error& With(const char* field, const std::string& value);

  operator Status() const;  // NOLINT: reads as a return value

 private:
  void Field(const char* field, const std::string& json);

  Code code_;
  const char* class_name_;
  std::string message_;
  std::string fields_;
};

inline Error InvalidArgument(std::string message) {
  return Error(Code::kInvalidArgument, "InvalidArgumentError").Says(std::move(message));
}

inline Error Stale(std::string message) {
  return Error(Code::kFailedPrecondition, "StaleHandleError").Says(std::move(message));
}

inline Error VersionSkew(std::string message) {
  return Error(Code::kFailedPrecondition, "VersionSkewError").Says(std::move(message));
}

// Returns the error for a rank that would receive more rows than its slab holds, in a group with
// on_overflow="error".
inline Error OverflowError(const std::string& layer, int64_t rank, int64_t demand,
                           int64_t capacity) {
  return Error(Code::kResourceExhausted, "CapacityOverflowError")
      .Says("layer " + layer + ": rank " + std::to_string(rank) + " would receive " +
            std::to_string(demand) + " rows, its slab holds " + std::to_string(capacity))
      .With("layer", layer)
      .With("rank", rank)
      .With("demand", demand)
      .With("capacity", capacity);
}

inline Error Internal(std::string message) {
  return Error(Code::kInternal, "EpRuntimeError").Says(std::move(message));
}

#define EP_RETURN_IF_ERROR(expr)              \
  do {                                        \
    ::ep_runtime::Status ep_status_ = (expr); \
    if (!ep_status_.ok()) return ep_status_;  \
  } while (false)

}  // namespace ep_runtime

#endif  // EP_RUNTIME_CORE_BASE_STATUS_H_
