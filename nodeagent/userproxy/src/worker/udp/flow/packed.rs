//! A flow on its way from one proxy to the next.

use std::sync::Arc;

use super::Flow;
use crate::handover::FlowState;
use crate::listening::Listening;
use crate::picker::Pool;
use crate::port::Port;
use crate::shares::Kind;
use crate::worker::core::Core;
use crate::worker::token::Token;

impl Flow {
    /// Takes the flow's socket out, which is not closed.
    pub(in crate::worker) fn pack(self, core: &Core) -> FlowState {
        let _ = core.unwatch(&self.socket);
        FlowState {
            listener: self.listening.id,
            number: self.thread,
            key: self.port.key.clone(),
            endpoint: self.endpoint,
            client: self.client,
            socket: self.socket,
        }
    }

    /// Continues with a flow of an earlier proxy, without another attempt if the endpoint refuses.
    pub(in crate::worker) fn unpack(
        core: &Core,
        token: Token,
        state: FlowState,
        listening: Arc<Listening>,
        port: Arc<Port>,
    ) -> std::io::Result<Self> {
        core.watch_level(&state.socket, token)?;
        port.inherited(state.endpoint);
        let answers = listening.answer_place(state.number, &port.key.service);
        Ok(Self {
            token,
            listening,
            thread: state.number,
            answers,
            _seat: port.owners.force(Kind::Flows),
            client: state.client,
            socket: state.socket,
            version: port.version(),
            port,
            pool: Pool::Cluster,
            endpoint: state.endpoint,
            first: None,
            tried: Vec::new(),
            started: core.now,
            touched: core.now,
        })
    }
}
