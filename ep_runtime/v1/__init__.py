"""Generated stubs of the wire contract (`proto/ep_runtime/v1`). Never edited by hand."""
