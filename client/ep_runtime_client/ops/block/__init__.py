"""The block call: dispatch, experts and combine as one op forward and one backward."""
