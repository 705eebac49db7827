"""Parts that all benches share: options, routings, cases, processes and clocks."""
