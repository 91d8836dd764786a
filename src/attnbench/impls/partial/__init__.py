"""What attention over parts of a whole is built from: the merge of partial results, and a plain partial form."""
