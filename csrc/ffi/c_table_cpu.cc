// The table of the CPU library.

#include <memory>
#include <utility>
#include <vector>

#include "cpu/row_ops.h"
#include "ffi/c_table.h"
#include "ffi/site.h"

namespace ep_runtime {

Status OpenGroup(const EpGroupOptions& options, int board_fd, const std::vector<int>& window_fds,
                 std::shared_ptr<Group>* out) {
  std::unique_ptr<GroupOptions> made;
  EP_RETURN_IF_ERROR(ToOptions(options, &made));
  return Group::Open(std::move(*made), board_fd, window_fds, out);
}

namespace {

int64_t EpWindowBytes(const EpGroupOptions* options) { return WindowBytes(ToSizes(*options)); }

int EpUseRowOps(int level) { return UseRowOps(static_cast<RowOpsLevel>(level)) ? 0 : -1; }

}  // namespace
}  // namespace ep_runtime

extern "C" __attribute__((visibility("default"))) const void* EpRuntimeTable() {
  using namespace ep_runtime;  // NOLINT: the table's fields are all from there
  static const EpTable table = {
      kTableAbi,
      sizeof(EpTable),
      EP_RUNTIME_VERSION,
      kTargets,
      kNumTargets,
      &SiteState::id,
      &SiteState::info,
      EpOpenGroup,
      EpAddLayers,
      EpRemoveLayers,
      EpCloseGroup,
      EpCheckGroup,
      EpFillStaging,
      EpWindowBytes,
      EpControlBytes,
      EpStructs,
      EpUseRowOps,
      /*num_devices=*/nullptr,
      /*device_uuid=*/nullptr,
      /*reaches=*/nullptr,
      /*architectures=*/nullptr,
  };
  return &table;
}
