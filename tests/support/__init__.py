"""What the tests that cross packages share: tiny runs, children that are forked with everything imported, comparisons."""
