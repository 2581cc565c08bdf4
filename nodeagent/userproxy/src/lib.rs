//! kplane's userspace data path: connections and datagrams arrive at sockets of this process, which chooses an endpoint,
//! tries another one if the first does not answer, and moves the data (`userspace.md`, U50..U57).
//!
//! [`Proxy`] has the threads, and [`Table`] the ServicePorts. Everything that decides is pure: `picker`, `health`,
//! `affinity`, `budget`. Everything that touches sockets is in `worker`.
//!
//! The crate knows ServicePorts, endpoints and sockets, and nothing of plans.

mod affinity;
mod budget;
mod counters;
mod handover;
mod health;
mod limits;
mod listening;
mod picker;
mod port;
mod proxy;
mod shares;
mod table;
mod worker;

pub use counters::{Counts, Failure};
pub use handover::{Bundle, HandoverError, HandoverListener, Inheritance, Successor, ask};
pub use limits::Limits;
pub use listening::{ListenerId, Role};
pub use picker::{Endpoints, Pool};
pub use port::{Options, PortSpec, RouteSpec};
pub use proxy::{Proxy, Settings, StartError};
pub use table::Table;
pub use worker::{Origins, Transparency};
