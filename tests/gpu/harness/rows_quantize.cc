// Checks quantization.
#include "rows_case.h"

namespace rows_test {
namespace {

const RowType kTypes[] = {RowType::kBF16, RowType::kF16, RowType::kF32};
const char* const kTypeNames[] = {"f32", "bf16", "f16"};

struct QuantizeCase {
  Slabs slabs;
  RowType type;
  Fp8Format format;
  bool power_of_two;
  bool clear_slack;
  int width;

  std::string name(const char* what) const {
    return std::string("quantize ") + what + " " + kTypeNames[static_cast<int>(type)] +
           (format == Fp8Format::kE4M3 ? " e4m3" : " e5m2") + (power_of_two ? " 2^n" : "") +
           (clear_slack ? " cleared" : "") + ", " + std::to_string(slabs.slabs) + " x " +
           std::to_string(slabs.rows) + " rows of " + std::to_string(width) + ", " +
           std::to_string(slabs.used) + " used in " + std::to_string(slabs.groups) + " groups";
  }
};

// Values of very different sizes, some of them zero, denormal, infinite or NaN.
float AnyValue(std::mt19937& random, RowType type, int exponent) {
  std::normal_distribution<float> normal;
  const bool half = type == RowType::kF16;
  switch (random() % 400) {
    case 0:
      return random() % 2 ? INFINITY : -INFINITY;
    case 1:
      return std::copysign(std::nanf(""), random() % 2 ? 1.0f : -1.0f);
    case 2:
    case 3:
      return random() % 2 ? 0.0f : -0.0f;
    case 4:
      return half ? 6e-8f : FromBits(0x00400000u | random() % 2 << 31);  // denormal
    case 5:
      return half ? 65504.0f : 3.0e38f;
    default:
      return std::ldexp(normal(random), exponent);
  }
}

// Slack rows are NaN.
Floats AnyRows(std::mt19937& random, const std::vector<int>& owner, RowType type, int width) {
  Floats values(type, static_cast<int64_t>(owner.size()) * width);
  const int spread = type == RowType::kF16 ? 10 : 100;
  for (size_t row = 0; row < owner.size(); ++row) {
    int exponent = static_cast<int>(random() % (2 * spread)) - spread;
    if (random() % 9 == 0) exponent = type == RowType::kF16 ? -20 : -135;
    for (int i = 0; i < width; ++i) {
      const float value = owner[row] < 0 ? std::nanf("") : AnyValue(random, type, exponent);
      values.set(row * width + i, value);
    }
  }
  return values;
}

bool Same(const char* what, const std::vector<uint8_t>& got, const std::vector<uint8_t>& want,
          const std::vector<char>& looked_at = {}) {
  for (size_t i = 0; i < want.size(); ++i) {
    if ((!looked_at.empty() && !looked_at[i]) || got[i] == want[i]) continue;
    std::printf("%s: byte %zu of %zu: got %02X, want %02X\n", what, i, want.size(), got[i],
                want[i]);
    return false;
  }
  return true;
}

std::vector<uint8_t> Bytes(const std::vector<float>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

bool CheckTensor(std::mt19937& random, const QuantizeCase& c) {
  const Floats values = AnyRows(random, c.slabs.owner, c.type, c.width);
  const int groups = c.slabs.slabs * c.slabs.groups;
  const int experts = random() % 2 ? groups : c.slabs.groups;
  const Memory sizes(c.slabs.sizes), x(values);
  const Memory amax(experts * int64_t{sizeof(float)}), data(c.slabs.all_rows() * c.width);
  const ec::AmaxParams largest{c.type, c.slabs.On(sizes), c.width, experts,
                               x.as(), amax.as<float>()};
  if (!RunTwice([&] { return ec::LaunchGroupAmax(nullptr, largest); }, {&amax}, c.name("amax"))) {
    return false;
  }
  std::vector<Amax> found(experts);
  for (int64_t row = 0; row < c.slabs.all_rows(); ++row) {
    if (c.slabs.owner[row] < 0) continue;
    for (int i = 0; i < c.width; ++i) {
      found[c.slabs.owner[row] % experts].Add(values.at(row * c.width + i));
    }
  }
  std::vector<float> wanted(experts), scales(groups);
  for (int e = 0; e < experts; ++e) wanted[e] = found[e].value;
  if (!Same("amax", amax.read(), Bytes(wanted))) return false;
  for (int g = 0; g < groups; ++g) scales[g] = ScaleOf(wanted[g % experts], c.format, false);
  if (random() % 4 == 0) {
    for (float& scale : scales) scale *= 0.3f;  // like scales of earlier calls: values saturate
  }
  const Memory scale(scales);
  const ec::QuantizeRowsParams params{
      c.type, c.format,      c.slabs.On(sizes),  c.width, x.as(), scale.as<float>(),
      false,  c.clear_slack, data.as<uint8_t>(), nullptr};
  if (!RunTwice([&] { return ec::LaunchQuantizeRows(nullptr, params); }, {&data},
                c.name("tensor"))) {
    return false;
  }
  std::vector<uint8_t> want(c.slabs.all_rows() * c.width, c.clear_slack ? 0 : 0xFF);
  for (int64_t row = 0; row < c.slabs.all_rows(); ++row) {
    if (c.slabs.owner[row] < 0) continue;
    for (int64_t i = row * c.width; i < (row + 1) * c.width; ++i) {
      want[i] = Quantized(values.at(i), scales[c.slabs.owner[row]], c.format);
    }
  }
  return Same("data", data.read(), want);
}

bool CheckTiles(std::mt19937& random, const QuantizeCase& c) {
  const Floats values = AnyRows(random, c.slabs.owner, c.type, c.width);
  const int tiles = (c.width + ec::kTile - 1) / ec::kTile;
  const int64_t rows = c.slabs.all_rows();
  const Memory sizes(c.slabs.sizes), x(values);
  const Memory data(rows * c.width), scale(rows * tiles * int64_t{sizeof(float)});
  const ec::QuantizeRowsParams params{
      c.type,         c.format,      c.slabs.On(sizes),  c.width,          x.as(), nullptr,
      c.power_of_two, c.clear_slack, data.as<uint8_t>(), scale.as<float>()};
  if (!RunTwice([&] { return ec::LaunchQuantizeRows(nullptr, params); }, {&data, &scale},
                c.name("tiles"))) {
    return false;
  }
  std::vector<uint8_t> want(rows * c.width, c.clear_slack ? 0 : 0xFF);
  std::vector<float> scales(rows * tiles, c.clear_slack ? 1.0f : FromBits(0xFFFFFFFFu));
  for (int64_t row = 0; row < rows; ++row) {
    if (c.slabs.owner[row] < 0) continue;
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t first = row * c.width + tile * ec::kTile;
      const int64_t end = std::min(first + ec::kTile, (row + 1) * c.width);
      Amax amax;
      for (int64_t i = first; i < end; ++i) amax.Add(values.at(i));
      const float s = ScaleOf(amax.value, c.format, c.power_of_two);
      scales[row * tiles + tile] = s;
      for (int64_t i = first; i < end; ++i) want[i] = Quantized(values.at(i), s, c.format);
    }
  }
  return Same("data", data.read(), want) && Same("scale", scale.read(), Bytes(scales));
}

struct WeightsCase {
  int count, middle, rows;
  int down, across;  // blocks
  Floats values;

  WeightsCase(std::mt19937& random, const QuantizeCase& c, int multiple)
      : count(1 + random() % 3),
        middle(1 + random() % 2),
        rows(multiple * (1 + random() % (300 / multiple))),
        down((rows + ec::kTile - 1) / ec::kTile),
        across((c.width + ec::kTile - 1) / ec::kTile),
        values(AnyRows(random, std::vector<int>(count * rows * middle, 0), c.type, c.width)) {}
  int64_t blocks() const { return int64_t{count} * down * middle * across; }
};

struct WeightsWanted {
  std::vector<uint8_t> data, transposed;
  std::vector<float> scales;

  // Without `given` every block has its own scale.
  WeightsWanted(const QuantizeCase& c, const WeightsCase& w, const std::vector<float>& given)
      : data(int64_t{w.count} * w.rows * w.middle * c.width),
        transposed(data.size()),
        scales(w.blocks()) {
    for (int64_t block = 0; block < w.blocks(); ++block) {
      const int column = block % w.across * ec::kTile, m = block / w.across % w.middle;
      const int row = block / w.across / w.middle % w.down * ec::kTile;
      const int g = block / w.across / w.middle / w.down;
      const auto each = [&](const std::function<void(int64_t, int64_t)>& visit) {
        for (int r = row; r < std::min(row + ec::kTile, w.rows); ++r) {
          for (int i = column; i < std::min(column + ec::kTile, c.width); ++i) {
            visit(((int64_t{g} * w.rows + r) * w.middle + m) * c.width + i,
                  ((int64_t{g} * w.middle + m) * c.width + i) * w.rows + r);
          }
        }
      };
      Amax amax;
      each([&](int64_t at, int64_t) { amax.Add(w.values.at(at)); });
      scales[block] = given.empty() ? ScaleOf(amax.value, c.format, c.power_of_two) : given[g];
      each([&](int64_t at, int64_t to) {
        data[at] = transposed[to] = Quantized(w.values.at(at), scales[block], c.format);
      });
    }
  }
};

bool CheckBlocks(std::mt19937& random, const QuantizeCase& c) {
  const WeightsCase w(random, c, 1);
  const WeightsWanted want(c, w, {});
  const Memory x(w.values), data(want.data.size()), scale(w.blocks() * 4);
  const ec::QuantizeWeightsParams params{
      c.type,  c.format,         w.count, w.rows,         w.middle,
      c.width, x.as(),           nullptr, c.power_of_two, data.as<uint8_t>(),
      nullptr, scale.as<float>()};
  if (!RunTwice([&] { return ec::LaunchQuantizeWeights(nullptr, params); }, {&data, &scale},
                c.name("blocks"))) {
    return false;
  }
  return Same("data", data.read(), want.data) && Same("scale", scale.read(), Bytes(want.scales));
}

// Checks both layouts, with scales of blocks and with given scales.
bool CheckWeights(std::mt19937& random, const QuantizeCase& c) {
  const WeightsCase w(random, c, ec::kTransposedMultiple);
  std::vector<float> given;
  if (random() % 2) {
    for (int g = 0; g < w.count; ++g) given.push_back(std::ldexp(1.3f, -10 * g));
  }
  const WeightsWanted want(c, w, given);
  const Memory x(w.values), scales(given), data(want.data.size()), transposed(want.data.size());
  const Memory scale(w.blocks() * 4);
  const ec::QuantizeWeightsParams params{c.type,
                                         c.format,
                                         w.count,
                                         w.rows,
                                         w.middle,
                                         c.width,
                                         x.as(),
                                         given.empty() ? nullptr : scales.as<float>(),
                                         c.power_of_two,
                                         data.as<uint8_t>(),
                                         transposed.as<uint8_t>(),
                                         given.empty() ? scale.as<float>() : nullptr};
  if (!RunTwice([&] { return ec::LaunchQuantizeWeights(nullptr, params); },
                {&data, &transposed, &scale}, c.name("weights"))) {
    return false;
  }
  return Same("data", data.read(), want.data) &&
         Same("transposed", transposed.read(), want.transposed) &&
         (!given.empty() || Same("scale", scale.read(), Bytes(want.scales)));
}

// MXFP8 of every 32 values along rows, or across rows. Slack counts as zeros.
struct MxWanted {
  std::vector<uint8_t> data, scale;

  MxWanted(const QuantizeCase& c, const Floats& values, bool across)
      : data(c.slabs.all_rows() * c.width), scale(data.size() / ec::kMxTile) {
    const int64_t step = across ? c.width : 1;
    for (size_t tile = 0; tile < scale.size(); ++tile) {
      const int64_t first = across ? tile / c.width * ec::kMxTile * c.width + tile % c.width
                                   : static_cast<int64_t>(tile) * ec::kMxTile;
      const auto there = [&](int64_t at) { return c.slabs.owner[at / c.width] >= 0; };
      Amax amax;
      for (int i = 0; i < ec::kMxTile; ++i) {
        if (there(first + i * step)) amax.Add(values.at(first + i * step));
      }
      const float s = ScaleOf(amax.value, c.format, true);
      scale[tile] = ExponentByte(s);
      for (int i = 0; i < ec::kMxTile; ++i) {
        const int64_t at = first + i * step;
        data[at] = there(at) ? Quantized(values.at(at), s, c.format) : 0;
      }
    }
  }
};

bool CheckMx(std::mt19937& random, const QuantizeCase& c) {
  const Floats values = AnyRows(random, c.slabs.owner, c.type, c.width);
  const int64_t rows = c.slabs.all_rows();
  const Memory sizes(c.slabs.sizes), x(values), data(rows * c.width), columns(rows * c.width);
  const Memory scale(rows * c.width / ec::kMxTile), column_scale(rows * c.width / ec::kMxTile);
  const ec::QuantizeMxParams params{c.type,
                                    c.format,
                                    c.slabs.On(sizes),
                                    c.width,
                                    x.as(),
                                    c.clear_slack,
                                    data.as<uint8_t>(),
                                    scale.as<uint8_t>(),
                                    columns.as<uint8_t>(),
                                    column_scale.as<uint8_t>()};
  if (!RunTwice([&] { return ec::LaunchQuantizeMx(nullptr, params); },
                {&data, &scale, &columns, &column_scale}, c.name("mx"))) {
    return false;
  }
  const MxWanted along(c, values, false), across(c, values, true);
  std::vector<char> used(rows * c.width), used_tiles(along.scale.size()), used_columns(used_tiles);
  for (int64_t i = 0; i < rows * c.width; ++i) {
    const bool there = c.clear_slack || c.slabs.owner[i / c.width] >= 0;
    used[i] = there;
    used_tiles[i / ec::kMxTile] |= there;
    used_columns[i / c.width / ec::kMxTile * c.width + i % c.width] |= there;
  }
  return Same("data", data.read(), along.data, used) &&
         Same("scale", scale.read(), along.scale, used_tiles) &&
         Same("columns", columns.read(), across.data, used) &&
         Same("column scale", column_scale.read(), across.scale, used_columns);
}

}  // namespace

void CheckQuantized(std::mt19937& random, int count, Tally* tally) {
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  for (int i = 0; i < count; ++i) {
    const int width = 8 * (1 + below(below(3) == 0 ? 90 : 20));
    QuantizeCase c{RandomSlabs(random), kTypes[below(3)], static_cast<Fp8Format>(below(2)),
                   below(2) == 0,       below(2) == 0,    width};
    tally->Add(CheckTensor(random, c), c.name("tensor"));
    tally->Add(CheckTiles(random, c), c.name("tiles"));
    tally->Add(CheckBlocks(random, c), c.name("blocks"));
    tally->Add(CheckWeights(random, c), c.name("weights"));
    c.slabs = RandomSlabs(random, ec::kMxTile);
    c.width = ec::kMxTile * (1 + below(12));
    tally->Add(CheckMx(random, c), c.name("mx"));
  }
}

}  // namespace rows_test
