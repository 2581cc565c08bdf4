//! Complete lists: streamed where the server supports it, else in pages.

use tokio::time::{Instant, timeout};

use super::{Closed, PAGE, Phase, Reflector, STREAM_SILENCE, Then, Watching};
use crate::kubernetes::Failure;
use crate::source::kubernetes::gathering::Gathering;
use crate::source::kubernetes::memory::Verdict;
use crate::source::kubernetes::transport::{
    ObjectPage, PageRequest, Transport, Watch, WatchEvent, WatchFrom,
};

impl<T: Transport> Reflector<T> {
    pub(super) async fn list(&mut self) -> Result<Phase<T::Watch>, Closed> {
        self.second_look.begins();
        let list = Gathering::new(&self.memory);
        if self.no_streams {
            return self.begin_pages(list).await;
        }
        match self.transport.watch(WatchFrom::Everything).await {
            Ok(watch) => {
                self.tell(list.begin(self.kind)).await?;
                Ok(Phase::Streaming { watch, list })
            }
            Err(failure) if refuses_streams(&failure) => {
                self.no_streams = true;
                self.begin_pages(list).await
            }
            Err(failure) => self.failed("watch", failure, Then::List).await,
        }
    }

    pub(super) async fn begin_pages(&mut self, list: Gathering) -> Result<Phase<T::Watch>, Closed> {
        self.tell(list.begin(self.kind)).await?;
        let next = PageRequest {
            limit: PAGE,
            next: None,
        };
        Ok(Phase::Paging { list, next })
    }

    pub(super) async fn page(
        &mut self,
        mut list: Gathering,
        request: PageRequest,
    ) -> Result<Phase<T::Watch>, Closed> {
        match self.transport.page(&request).await {
            Ok(page) => {
                let ObjectPage { version, .. } = page;
                let next = page.next.clone();
                let events = list.page(&self.memory, page);
                self.tell(events).await?;
                if next.is_some() {
                    let limit = request.limit;
                    let next = PageRequest { limit, next };
                    return Ok(Phase::Paging { list, next });
                }
                self.complete(list, version, None).await
            }
            // The list took so long that its state was compacted: list again, in one piece.
            Err(Failure::Gone) if request.next.is_some() => {
                let list = Gathering::new(&self.memory);
                self.tell(list.begin(self.kind)).await?;
                let next = PageRequest {
                    limit: 0,
                    next: None,
                };
                Ok(Phase::Paging { list, next })
            }
            Err(failure) => self.failed("list", failure, Then::List).await,
        }
    }

    pub(super) async fn stream(
        &mut self,
        mut watch: T::Watch,
        mut list: Gathering,
    ) -> Result<Phase<T::Watch>, Closed> {
        let heard = tokio::select! {
            heard = timeout(STREAM_SILENCE, watch.next()) => heard,
            () = self.outbox.closed() => return Err(Closed),
        };
        let said = match heard {
            Ok(Ok(Some(said))) => said,
            Ok(Err(failure)) if !refuses_streams(&failure) => {
                return self.failed("list", failure, Then::List).await;
            }
            Ok(Ok(None) | Err(_)) | Err(_) => return self.without_streams().await,
        };
        let mut events = Vec::new();
        let mut said = said.into_iter();
        while let Some(one) = said.next() {
            let WatchEvent::Bookmark {
                version,
                initial_end,
            } = one
            else {
                events.extend(list.said(&self.memory, one));
                continue;
            };
            if !initial_end {
                // A server that supports streaming lists does not send this in the middle of one.
                return self.without_streams().await;
            }
            self.tell(events).await?;
            let state = self.complete(list, version, Some(watch)).await?;
            return match state {
                Phase::Watching(watching) if said.len() > 0 => {
                    self.heard(watching, said.collect()).await
                }
                state => Ok(state),
            };
        }
        self.tell(events).await?;
        Ok(Phase::Streaming { watch, list })
    }

    pub(super) async fn without_streams(&mut self) -> Result<Phase<T::Watch>, Closed> {
        self.no_streams = true;
        let list = Gathering::new(&self.memory);
        self.begin_pages(list).await
    }

    /// Handles the end of a list. `watch` continues where the list ends.
    pub(super) async fn complete(
        &mut self,
        mut list: Gathering,
        version: u64,
        watch: Option<T::Watch>,
    ) -> Result<Phase<T::Watch>, Closed> {
        self.outage_since = None;
        let named = list.complete(&self.memory);
        match self.memory.judge(version, named, Instant::now()) {
            Verdict::Accept => self.accept(list, version, watch, false).await,
            Verdict::Confirmed => self.accept(list, version, watch, true).await,
            Verdict::KeepMissing(hold) => {
                self.memory.advance(version);
                let events = list.additions(&mut self.memory);
                self.report.doubts(&self.transport.server(), hold.reason);
                self.tell(events).await?;
                Ok(Phase::after(hold.pause, Then::List))
            }
            Verdict::Ignore(hold) => {
                self.report.doubts(&self.transport.server(), hold.reason);
                Ok(Phase::after(hold.pause, Then::List))
            }
        }
    }

    /// Accepts a list; `confirmed` if earlier lists agreed.
    async fn accept(
        &mut self,
        list: Gathering,
        version: u64,
        watch: Option<T::Watch>,
        confirmed: bool,
    ) -> Result<Phase<T::Watch>, Closed> {
        let (first, empty) = (list.is_first(), list.len() == 0);
        let (mut events, unreadable) = list.accept(self.kind, &mut self.memory, version, confirmed);
        events.push(self.version());
        self.synced = true;
        self.report.listed(&unreadable, first);
        self.second_look.listed(first, empty);
        if first {
            self.tell_doubt().await?;
        }
        self.tell(events).await?;
        // Results of a second list are passed on before the end of the doubt.
        self.tell_doubt().await?;
        Ok(match watch {
            Some(watch) => Phase::Watching(Watching::new(watch)),
            None => Phase::Unwatched,
        })
    }
}

/// Returns whether a failure indicates that the server does not support streaming lists.
fn refuses_streams(failure: &Failure) -> bool {
    matches!(
        failure,
        Failure::Refused { .. } | Failure::Server { .. } | Failure::Malformed(_)
    )
}
