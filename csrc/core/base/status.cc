// Status and Error: build the texts of errors.
#include "core/base/status.h"

#include <cstdio>

namespace ep_runtime {
namespace {

// Escapes braces too, because readers take the first " {...}" of a line as the fields.
std::string Quote(const std::string& text) {
  std::string out = "\"";
  for (unsigned char c : text) {
    if (c < 0x20 || c == '"' || c == '\\' || c == '{' || c == '}') {
      char code[8];
      std::snprintf(code, sizeof(code), "\\u%04x", c);
      out += code;
    } else {
      out += static_cast<char>(c);
    }
  }
  return out + "\"";
}

}  // namespace

Error& Error::Says(std::string message) {
  for (char& c : message) {
    if (c == '{') c = '(';
    if (c == '}') c = ')';
    if (c == '\n') c = ' ';
  }
  message_ = std::move(message);
  return *this;
}

Error& Error::In(const std::string& where) { return Says(where + ": " + message_); }

void Error::Field(const char* field, const std::string& json) {
  if (!fields_.empty()) fields_ += ", ";
  fields_ += Quote(field) + ": " + json;
}

Error& Error::With(const char* field, int64_t value) {
  Field(field, std::to_string(value));
  return *this;
}

Error& Error::With(const char* field, double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.3f", value);
  Field(field, text);
  return *this;
}

Error& Error::With(const char* field, const std::string& value) {
  Field(field, Quote(value));
  return *this;
}

Error::operator Status() const {
  return Status(code_,
                std::string("EP_RUNTIME/") + class_name_ + ": " + message_ + " {" + fields_ + "}");
}

}  // namespace ep_runtime
