-- Which process of a node speaks for it: a copy of its data directory has the same id.
ALTER TABLE nodes ADD COLUMN instance TEXT NOT NULL DEFAULT '';
