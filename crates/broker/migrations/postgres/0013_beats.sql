-- How often a broker has said that it lives, so that two beats within a second can be told apart; and how its clock differs from the
-- database's, in milliseconds.
ALTER TABLE nodes ADD COLUMN beats BIGINT NOT NULL DEFAULT 0;
ALTER TABLE nodes ADD COLUMN clock_offset_ms BIGINT;
