"""What the tests that cross packages share: a tiny task, runs forked with everything imported, comparisons."""
