//! The whole stack with real processes: broker, gateway, launcher, boxd, command line.

mod access;
mod brokers;
mod command_line;
mod commands;
mod cuts;
mod faults;
mod isolation;
mod lifecycle;
mod load;
mod own_host;
mod paths;
mod revoking;
mod roots;
mod sharing;
mod terminals;
mod tokens;
mod unruly;
