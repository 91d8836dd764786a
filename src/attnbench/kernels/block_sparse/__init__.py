"""Block-sparse attention: only the blocks of queries by keys that a mask or a choice by content keeps are computed."""
