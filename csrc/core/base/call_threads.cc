// CallThreads: starts, reuses and parks threads.
#include "core/base/call_threads.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "core/base/float_mode.h"

namespace ep_runtime {
namespace {

constexpr size_t kStackBytes = 8 << 20;
constexpr auto kIdleTime = std::chrono::seconds(30);

struct ThreadStart {
  CallThreads* threads;
  std::function<void()> work;
};

}  // namespace

void CallThreads::Run(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      Worker* worker = idle_.back();
      idle_.pop_back();
      worker->work = std::move(work);
      worker->wake.notify_one();
      return;
    }
  }
  Start(std::move(work));
}

void CallThreads::Start(std::function<void()> work) {
  auto start = std::make_unique<ThreadStart>(ThreadStart{this, std::move(work)});
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  pthread_t thread;
  const int failed = pthread_create(&thread, &attributes, &CallThreads::ThreadMain, start.get());
  pthread_attr_destroy(&attributes);
  if (failed == 0) {
    start.release();
    return;
  }
  // No thread could be started, so run the work here. The call may then block the thread that would
  // start its peers' calls, but its wait is bounded and ends with an error that names the peers.
  start->work();
}

void* CallThreads::ThreadMain(void* self) {
  std::unique_ptr<ThreadStart> start(static_cast<ThreadStart*>(self));
  pthread_setname_np(pthread_self(), "ep-call");
  FlushSubnormals();
  CallThreads* threads = start->threads;
  std::function<void()> work = std::move(start->work);
  start.reset();
  threads->Serve(std::move(work));
  return nullptr;
}

void CallThreads::Serve(std::function<void()> first) {
  Worker self;
  self.work = std::move(first);
  for (;;) {
    self.work();
    self.work = nullptr;  // frees the call's objects before this thread becomes idle
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.push_back(&self);
    if (!self.wake.wait_for(lock, kIdleTime, [&] { return self.work != nullptr; })) {
      idle_.erase(std::find(idle_.begin(), idle_.end(), &self));
      return;
    }
  }
}

}  // namespace ep_runtime
