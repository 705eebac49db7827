// Runs index arithmetic of the grouped products' kernels on a host: the rows of groups, and which
// thread of a transposing block moves what. Prints one line per check, then "N of M wrong".
#include <ucontext.h>

#include <cstdio>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "cuda/gemm/copies/transpose_tile.h"
#include "cuda/gemm/product/groups.cuh"

ThreadIndex threadIdx;

namespace {

using namespace ep_runtime::cuda::gemm;

constexpr int kLanes = 32;
constexpr int kStackBytes = 64 << 10;

// A warp whose lanes run one after another, each until it exchanges a value.
class Warp {
 public:
  void Run(const std::function<void()>& code) {
    code_ = &code;
    running_ = this;
    for (int lane = 0; lane < kLanes; ++lane) {
      stacks_[lane].resize(kStackBytes);
      done_[lane] = false;
      getcontext(&lanes_[lane]);
      lanes_[lane].uc_stack.ss_sp = stacks_[lane].data();
      lanes_[lane].uc_stack.ss_size = kStackBytes;
      lanes_[lane].uc_link = &scheduler_;
      makecontext(&lanes_[lane], &Warp::Enter, 0);
    }
    for (bool more = true; more; turn_ ^= 1) {
      more = false;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (done_[lane]) continue;
        threadIdx.x = lane;
        swapcontext(&scheduler_, &lanes_[lane]);
        more |= !done_[lane];
      }
    }
  }
  uint64_t Exchange(uint64_t value, int lane) {
    const unsigned me = threadIdx.x;
    const int turn = turn_;
    given_[turn][me] = value;
    swapcontext(&lanes_[me], &scheduler_);
    return given_[turn][lane];
  }

  static Warp* running_;

 private:
  static void Enter() {
    const unsigned me = threadIdx.x;
    (*running_->code_)();
    running_->done_[me] = true;
  }

  const std::function<void()>* code_ = nullptr;
  ucontext_t scheduler_;
  ucontext_t lanes_[kLanes];
  std::vector<char> stacks_[kLanes];
  bool done_[kLanes];
  uint64_t given_[2][kLanes];
  int turn_ = 0;
};
Warp* Warp::running_ = nullptr;

struct Case {
  int slabs;
  int slab_rows;
  std::vector<int> sizes;
};

struct Place {
  int start;  // among all slabs' rows
  int size;
  int at;  // among all slabs' lines
};

// Places groups one after another, as in product.h.
std::vector<Place> Expected(const Case& c) {
  const int groups = static_cast<int>(c.sizes.size()) / c.slabs;
  std::vector<Place> places;
  for (int slab = 0; slab < c.slabs; ++slab) {
    int start = 0;
    int at = slab * static_cast<int>(PaddedSlabRows(c.slab_rows, groups));
    for (int g = 0; g < groups; ++g) {
      const int size = min(max(c.sizes[slab * groups + g], 0), c.slab_rows - start);
      places.push_back({slab * c.slab_rows + start, size, at});
      start += size;
      at += (size + 127) / 128 * 128;
    }
  }
  return places;
}

bool CheckGroups(const Case& c) {
  const int groups = static_cast<int>(c.sizes.size()) / c.slabs;
  const Groups given{c.sizes.data(), static_cast<int>(c.sizes.size()), groups,
                     static_cast<int>(c.sizes.size()), c.slab_rows};
  const int line = static_cast<int>(PaddedSlabRows(c.slab_rows, groups));
  const std::vector<Place> want = Expected(c);
  Warp warp;
  int wrong = 0;
  for (size_t g = 0; g < want.size(); ++g) {
    const int padded = (want[g].size + 127) / 128 * 128;
    // A group must end within its slab's line, whatever the sizes are.
    wrong += want[g].at + padded > (static_cast<int>(g) / groups + 1) * line;
    warp.Run([&] {
      const Rows rows = FindRows(given, static_cast<int>(g));
      wrong += rows.size != want[g].size || (rows.size > 0 && rows.start != want[g].start);
      const Rows there = FindPaddedRows(given, static_cast<int>(g));
      wrong += there.size != padded || there.start != want[g].at;
    });
  }
  for (int slab = 0; slab < c.slabs; ++slab) {
    for (int at = 0; at < line; at += kPaddedTo) {
      Place tile{0, 0, 0};
      for (int g = slab * groups; g < (slab + 1) * groups; ++g) {
        const int inside = slab * line + at - want[g].at;
        if (inside < 0 || inside >= want[g].size) continue;
        tile = {want[g].start + inside, min(want[g].size - inside, kPaddedTo), 0};
      }
      warp.Run([&] {
        const Rows found = FindRowsAt(given, slab, at);
        wrong += found.size != tile.size || (found.size > 0 && found.start != tile.start);
      });
    }
  }
  return wrong == 0;
}

// Every byte is read once and written once, and no warp has a bank conflict in shared memory.
bool CheckTile() {
  int wrong = 0;
  std::set<int> vectors, words;
  for (int thread = 0; thread < 256; ++thread) {
    for (int turn = 0; turn < 4; ++turn) {
      vectors.insert(StoredVector(TileLine(thread, turn), TileVector(thread)));
    }
    for (int line = FirstLine(thread); line < FirstLine(thread) + 16; ++line) {
      const int word = StoredWord(line, ColumnWord(thread));
      words.insert(word);
      const int vector = ColumnWord(thread) / 4;
      wrong += word / 4 != StoredVector(line, vector) || word % 4 != ColumnWord(thread) % 4;
    }
  }
  wrong += vectors.size() != 1024 || words.size() != 4096;
  for (int warp = 0; warp < 8; ++warp) {
    for (int i = 0; i < 16; ++i) {
      std::set<int> banks;
      for (int lane = 0; lane < 32; ++lane) {
        const int thread = warp * 32 + lane;
        banks.insert(StoredWord(FirstLine(thread) + i, ColumnWord(thread)) % 32);
      }
      wrong += banks.size() != 32;
    }
    for (int quarter = 0; quarter < 4;
         ++quarter) {  // lanes that one 16-byte access serves at a time
      std::set<int> banks;
      for (int lane = 8 * quarter; lane < 8 * quarter + 8; ++lane) {
        const int thread = warp * 32 + lane;
        banks.insert(StoredVector(TileLine(thread, 1), TileVector(thread)) % 8);
      }
      wrong += banks.size() != 8;
    }
  }
  return wrong == 0;
}

// Counts the 16-byte banks that eight neighbouring threads access.
int CountBanks(int first_thread, const std::function<int(int)>& vector) {
  std::set<int> banks;
  for (int thread = first_thread; thread < first_thread + 8; ++thread) {
    banks.insert(vector(thread) % 8);
  }
  return static_cast<int>(banks.size());
}

// CheckTile for f32 values: 32 columns of 128 lines, with four lines of a column in a vector.
bool CheckFloatTile() {
  int wrong = 0;
  std::set<int> written, read;
  for (int thread = 0; thread < 256; ++thread) {
    for (int i = 0; i < 4; ++i) {
      written.insert(TransposedVector(4 * FloatVector(thread) + i, FloatFour(thread)));
      read.insert(TransposedVector(FloatColumn(thread, i), WrittenFour(thread)));
    }
  }
  wrong += written.size() != 1024 || written != read || *written.rbegin() != 1023;
  for (int first = 0; first < 256; first += 8) {
    for (int i = 0; i < 4; ++i) {
      wrong += CountBanks(first, [&](int thread) {
                 return TransposedVector(4 * FloatVector(thread) + i, FloatFour(thread));
               }) != 8;
      wrong += CountBanks(first, [&](int thread) {
                 return TransposedVector(FloatColumn(thread, i), WrittenFour(thread));
               }) != 8;
    }
  }
  return wrong == 0;
}

std::vector<Case> Cases() {
  std::vector<Case> cases = {{1, 128, {128}},           {1, 10, {3, 0, 7}},
                             {1, 400, {200, 300, 100}}, {2, 300, {100, 0, 60, 33, 200, 17}},
                             {1, 64, {-5, 64, 9}},      {1, 500, std::vector<int>(70, 7)}};
  std::mt19937 random(1);
  for (int i = 0; i < 12; ++i) {
    Case c{1 + static_cast<int>(random() % 3), 1 + static_cast<int>(random() % 3000), {}};
    const int groups = 1 + static_cast<int>(random() % 100);
    for (int g = 0; g < c.slabs * groups; ++g) {
      c.sizes.push_back(
          random() % 3 == 0 ? 0 : static_cast<int>(random() % (4 * c.slab_rows)) / groups);
    }
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

uint64_t FromLane(uint64_t value, int lane) { return Warp::running_->Exchange(value, lane); }

int main() {
  int wrong = 0, all = 0;
  for (const Case& c : Cases()) {
    const bool right = CheckGroups(c);
    if (!right) std::printf("groups %d: wrong\n", all);
    wrong += !right;
    ++all;
  }
  const auto check = [&](const char* what, bool right) {
    if (!right) std::printf("%s: wrong\n", what);
    wrong += !right;
    ++all;
  };
  check("tile", CheckTile());
  check("tile of f32", CheckFloatTile());
  std::printf("%d of %d wrong\n", wrong, all);
  return wrong > 0;
}
