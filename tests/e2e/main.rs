//! The whole stack with real processes: broker, gateway, launcher, boxd, command line.

mod access;
mod audit;
mod brokers;
mod command_line;
mod commands;
mod cuts;
mod events;
mod faults;
mod handing_on;
mod isolation;
mod kinds;
mod leaks;
mod lifecycle;
mod load;
mod operations;
mod own_host;
mod paths;
mod policy;
mod revoking;
mod roots;
mod sharing;
mod shell;
mod terminals;
mod tokens;
mod unruly;
